"""Several prompts in one completion request, by OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from agentspec.errors import OverloadedError
from agentspec.testing import Answer, FakeBackend
from agentspec.types import Speculation

DONE = Speculation(drafted=3, accepted=2, steps=1)


def script(request: Any) -> Any:
    text = request.text or "ids"
    if text == "busy":
        return ZeroDivisionError("a secret")
    return Answer(f"{text} said", speculation=DONE)


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return FakeBackend(script)


@pytest.fixture(scope="module")
def client(shared_gateway: Any, backend: FakeBackend) -> Iterator[openai.OpenAI]:
    running = shared_gateway({"m": backend})
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_choices_come_in_the_order_of_the_prompts(client: openai.OpenAI) -> None:
    prompts = [f"p{number}" for number in range(6)]
    answer = client.completions.create(model="m", prompt=prompts)
    assert [choice.text for choice in answer.choices] == [f"{prompt} said" for prompt in prompts]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage is not None and answer.usage.prompt_tokens == 6 and answer.usage.completion_tokens == 12
    assert answer.model_extra is not None and answer.model_extra["speculation"]["drafted"] == 18


def test_a_stream_ends_once_with_all_counts(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="m", prompt=["a", "b", "c"], stream=True, stream_options={"include_usage": True}
    )
    texts, chunks = dict.fromkeys(range(3), ""), list(stream)
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == ["a said", "b said", "c said"]
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 6
    assert sum(choice.finish_reason is not None for chunk in chunks for choice in chunk.choices) == 3


def test_token_ids_are_prompts_too(client: openai.OpenAI, backend: FakeBackend) -> None:
    answer = client.completions.create(model="m", prompt=[[1, 2], [3]])
    assert len(answer.choices) == 2
    assert [request.token_ids for request in backend.requests[-2:]] == [(1, 2), (3,)]
    assert len(client.completions.create(model="m", prompt=[1, 2]).choices) == 1
    assert len(client.completions.create(model="m", prompt=["a"]).choices) == 1


def test_one_that_fails_fails_all(client: openai.OpenAI, backend: FakeBackend) -> None:
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="m", prompt=["a", "busy", "b"])
    assert not backend.active


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"prompt": ["a", []]}, "prompt"),
    ],
)
def test_what_is_wrong_is_refused(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    refused = httpx.post(f"{client.base_url}completions", json={"model": "m", **fields})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param


def test_prompts_without_a_free_slot_get_429(gateway: Any) -> None:
    running = gateway({"m": FakeBackend(OverloadedError("busy", retry_after=1.0))})
    answer = httpx.post(f"{running.url}/v1/completions", json={"model": "m", "prompt": ["a", "b", "c"]})
    assert answer.status_code == 429 and "retry-after" in answer.headers
