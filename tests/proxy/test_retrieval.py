"""A model with retrieval by the gateway, LangChain and steps; what cannot work is refused at the start."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from agentspec.backends.base import Capabilities
from agentspec.backends.openai import OpenAIBackend
from agentspec.backends.settings import OpenAISettings, TorchSettings
from agentspec.errors import ConfigurationError
from agentspec.langchain import ChatAgentSpec
from agentspec.reasoning.retrieval.knowledge import folder
from agentspec.reasoning.retrieval.knowledge.base import Document
from agentspec.reasoning.settings import IndexSettings, RaLMSpecSettings, RemoteSettings
from agentspec.runtime import Runtime
from agentspec.settings.load import ModelSettings, Settings
from agentspec.step import report, step
from agentspec.testing import Answer, FakeBackend
from agentspec.types import RetrievalSpeculation

WORDS = [f"{first}{second}" for first in "bdfgkl" for second in ("an", "el", "ir", "os", "um")]
BODY = {"model": "read", "messages": [{"role": "user", "content": "Which ban and bel?"}], "max_tokens": 24}


class Reader(FakeBackend):
    """What it says next depends on every word of its prompt, the document's too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(self._next, **options)

    def _next(self, request: Any) -> Answer:
        draw = random.Random(zlib.crc32(self.prompt_text(request).encode()))
        return Answer("".join(f" {draw.choice(WORDS)}" for _ in range(4)), finish_reason="length")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw, path = random.Random(1), tmp_path_factory.mktemp("knowledge") / "words"
    texts = (" ".join(draw.choices(WORDS, k=8)) for _ in range(80))
    folder.build([Document(f"{at:02}", text) for at, text in enumerate(texts)], path, "bm25")
    return path


def settings(path: Path, **knobs: Any) -> Settings:
    given: dict[str, Any] = {"base": "large", "knowledge": "words", "stride": 2, **knobs}
    return Settings(
        backends={"large": TorchSettings(model="l")},
        models={"read": RaLMSpecSettings(**given), "plain": ModelSettings(backend="large")},
        knowledge={"words": IndexSettings(path=path)},
    )


def test_the_gateway_streams_verified_text_and_says_that_nothing_is_lost(gateway: Any, corpus: Path) -> None:
    running = gateway({"large": Reader()}, settings(corpus))
    answer = httpx.post(f"{running.url}/v1/chat/completions", json={**BODY, "stream": True})
    assert answer.headers["x-agentspec-lossless"].startswith("ralmspec; document_tokens=256")
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    said = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
    told = events[-1]["speculation"]
    assert told["lossy"] is False and told["strategy"] == "ralmspec" and told["steps"] == 6
    assert told["batches"] < told["queries"] and 0 <= told["hit_rate"] <= 1 and told["strides"][0] == 0
    assert set(told["seconds"]) == {"generate", "rolled_back", "retrieve", "verify", "encode"}
    off = httpx.post(f"{running.url}/v1/chat/completions", json=BODY, headers={"x-agentspec-speculation": "off"})
    assert off.json()["choices"][0]["message"]["content"] == said and len(said.split()) == 24
    assert off.json()["speculation"]["strides"] == [0] * 6
    assert "x-agentspec-lossless" in off.headers and "x-agentspec-lossy" not in off.headers


def test_raw_completions_are_answered_too(gateway: Any, corpus: Path, closing: Any) -> None:
    running = gateway({"large": Reader()}, settings(corpus))
    client = closing(openai.OpenAI(base_url=f"{running.url}/v1", api_key="none"))
    texts = {client.completions.create(model="read", prompt="ban bel", max_tokens=12).choices[0].text for _ in range(2)}
    assert len(texts) == 1 and len(texts.pop().split()) == 12


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        (
            {"messages": [{"role": "assistant", "content": "So"}], "continue_final_message": True},
            "continue_final_message",
        ),
    ],
)
def test_what_rounds_cannot_honour_is_refused(gateway: Any, corpus: Path, fields: dict[str, Any], param: str) -> None:
    running = gateway({"large": Reader()}, settings(corpus))
    answer = httpx.post(f"{running.url}/v1/chat/completions", json={**BODY, **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_a_knowledge_base_that_is_down_is_a_bad_gateway(gateway: Any, corpus: Path) -> None:
    down = settings(corpus).model_copy(update={"knowledge": {"words": RemoteSettings(url="http://127.0.0.1:1")}})  # type: ignore[arg-type]
    running = gateway({"large": Reader()}, down)
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=BODY)
    assert answer.status_code == 502 and answer.json()["error"]["code"] == "knowledge_base_error"
    assert httpx.post(f"{running.url}/v1/chat/completions", json={**BODY, "model": "plain"}).status_code == 200


def test_a_client_that_leaves_cancels_the_work(gateway: Any, corpus: Path, until: Callable[..., None]) -> None:
    model = Reader(latency=0.3)
    running = gateway({"large": model}, settings(corpus))
    url = f"{running.url}/v1/chat/completions"
    with httpx.stream("POST", url, json={**BODY, "stream": True}, timeout=300) as answer:
        next(answer.iter_lines())
    until(lambda: model.cancelled and not model.active)  # between two rounds nothing is active either


async def ask(runtime: Runtime) -> RetrievalSpeculation:
    from agentspec.types import GenerateRequest, SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=24)
    request = GenerateRequest("read", messages=BODY["messages"], sampling=sampling)  # type: ignore[arg-type]
    last = [delta async for delta in runtime.generate(request)][-1]
    assert isinstance(last.speculation, RetrievalSpeculation)
    return last.speculation


@pytest.mark.anyio
async def test_steps_and_langchain_ask_it_like_any_model(corpus: Path) -> None:
    async with Runtime(settings(corpus), backends={"large": Reader()}) as runtime:
        chat = ChatAgentSpec(model="read", runtime=runtime, max_tokens=8, temperature=0)

        @step("look up")
        async def look_up() -> str:
            return str((await chat.ainvoke("Which ban?")).content)

        assert len((await look_up()).split()) == 8
        assert "look up" in str(report())


def test_a_model_without_token_ids_is_refused_at_the_start(corpus: Path) -> None:
    runtime = Runtime(settings(corpus), backends={"large": FakeBackend(capabilities=Capabilities())})
    with pytest.raises(ConfigurationError, match=r"models\.read\.base"):
        runtime.start()


def test_an_endpoint_that_is_down_is_left_for_the_first_request(corpus: Path) -> None:
    backend = OpenAIBackend(OpenAISettings(base_url="http://127.0.0.1:1/v1", model="l"))  # type: ignore[arg-type]
    runtime = Runtime(settings(corpus), backends={"large": backend})
    runtime.start()
    assert runtime.ready


@pytest.mark.parametrize(("knobs", "named"), [({"knowledge": "word"}, "did you mean 'words'"), ({"base": "x"}, "base")])
def test_names_that_lead_nowhere_are_refused(corpus: Path, knobs: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        settings(corpus, **knobs)


def test_a_stream_of_messages(gateway: Any, corpus: Path) -> None:
    running = gateway({"large": Reader()}, settings(corpus))
    asked = {**BODY, "stream": True, "thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}
    answer = httpx.post(f"{running.url}/v1/messages", json=asked, timeout=60)
    whole = httpx.post(f"{running.url}/v1/messages", json=BODY, timeout=60).json()
    told = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert (
        "".join(event["delta"]["text"] for event in told if event["type"] == "content_block_delta")
        == (whole["content"][0]["text"])
    )
    assert whole["stop_reason"] == told[-2]["delta"]["stop_reason"] == "max_tokens"
