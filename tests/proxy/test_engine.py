"""The gateway in front of the local engine: a tiny random model for the protocol, the default model for sense."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.settings import TorchSettings
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ServerSettings

torch = pytest.importorskip("torch")
MODEL = "tiny"


def serving(model: str, **torch_settings: Any) -> Settings:
    return Settings(
        server=ServerSettings(request_timeout=60, queue_timeout=0.05, max_concurrent=4),
        backends={"local": TorchSettings(model=model, device="cpu", **torch_settings)},
        models={MODEL: ModelSettings(backend="local")},
    )


@pytest.fixture(scope="module")
def running(shared_gateway: Any, tiny_model: Path) -> Any:
    return shared_gateway({}, serving(str(tiny_model), max_active=2))


@pytest.fixture(scope="module")
def client(running: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, content: str = "hello", **fields: Any) -> Any:
    defaults: dict[str, Any] = {"max_tokens": 24, "seed": 1}
    messages: list[Any] = [{"role": "user", "content": content}]
    return client.chat.completions.create(model=MODEL, messages=messages, **{**defaults, **fields})


def test_prediction_is_drafted_from(client: openai.OpenAI) -> None:
    content = ask(client, "predict me", temperature=0).choices[0].message.content
    answer = ask(client, "predict me", temperature=0, prediction={"type": "content", "content": content})
    details = answer.usage.completion_tokens_details
    assert answer.choices[0].message.content == content
    assert details.accepted_prediction_tokens > 0 and details.rejected_prediction_tokens is not None


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(-2, 300) | st.text(max_size=3), max_size=3),
    st.dictionaries(st.integers(0, 300).map(str), st.floats(-100, 100), max_size=2),
)
NAMES = st.sampled_from(
    [
        "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "logit_bias", "seed", "stop", "stop_token_ids", "logprobs", "top_logprobs", "prompt", "stream",
    ]
)  # fmt: skip


@given(st.dictionaries(NAMES, VALUES, max_size=4), st.sampled_from(["ab", "é", [104], [0, 255]]))
def test_no_sampling_option_breaks_the_engine(client: openai.OpenAI, fields: dict[str, Any], prompt: Any) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 3, **fields}
    url = str(client.base_url).removesuffix("/") + "/completions"
    response = httpx.post(url, content=json.dumps(body), headers={"content-type": "application/json"}, timeout=300)
    assert response.status_code in (200, 400), response.text
    assert response.status_code == 400 or '"error"' not in response.text


@pytest.mark.slow
@pytest.mark.model
def test_the_default_model(shared_gateway: Any, default_model: Any) -> None:
    running = shared_gateway({}, serving("smollm2-135m"))
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        prompt = "one two three four five six seven eight " * 3
        answer = client.completions.create(model=MODEL, prompt=prompt + "one", max_tokens=24, temperature=0)
        assert answer.choices[0].text.startswith(" two three four five six seven eight one two")
        speculation: Any = answer.to_dict()["speculation"]
        assert speculation["accepted"] > 8 and speculation["steps"] < 16
        chat = ask(client, "What is the capital of France?", max_tokens=12, temperature=0)
        assert "Paris" in chat.choices[0].message.content


def test_answers_have_vllms_metrics_of_speculation_where_the_settings_ask_for_them(
    gateway: Any, tiny_model: Path
) -> None:
    running = gateway({}, serving(str(tiny_model), per_request_spec_decode_metrics="detailed"))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "again"}], "max_tokens": 24, "temperature": 0}

    def answer(**fields: Any) -> Any:
        return httpx.post(f"{running.url}/v1/chat/completions", json=body | fields, timeout=60)

    answer()
    told = answer().json()
    found = told["metrics"]["speculative_decoding"]
    accepted, drafted = found.pop("per_step_accepted"), found.pop("per_step_drafted")
    assert (sum(accepted), sum(drafted)) == (told["speculation"]["accepted"], told["speculation"]["drafted"])
    assert 0 < len(accepted) == len(drafted) <= told["speculation"]["steps"]
    assert found == {
        "mean_acceptance_length": 1 + sum(accepted) / len(accepted),
        "draft_acceptance_rate": sum(accepted) / sum(drafted),
        "acceptance_histogram": [accepted.count(length) for length in range(found["num_spec_tokens"] + 1)],
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": 48,
    }
    assert set(told["speculation"]) == {"drafted", "accepted", "steps", "estimated_seconds_saved"}
    streamed = answer(stream=True, stream_options={"include_usage": True}).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert [bool(event["choices"]) for event in events if "metrics" in event] == [False]
    assert "metrics" not in answer(n=2).json() and "metrics" not in answer(stream=True).text
