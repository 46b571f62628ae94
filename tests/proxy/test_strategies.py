"""Strategies behind the gateway: retrieval, and what is found out of endpoints when a strategy is made ready."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.backends.base import Capabilities
from agentspec.backends.openai import OpenAIBackend
from agentspec.backends.settings import OpenAISettings, TorchSettings
from agentspec.errors import ConfigurationError
from agentspec.protocol.speculation import RetrievalSpeculation
from agentspec.reasoning.retrieval.knowledge import folder
from agentspec.reasoning.retrieval.knowledge.base import Document, Query, SearchResult
from agentspec.reasoning.retrieval.knowledge.bm25 import Bm25Metric
from agentspec.reasoning.settings import IndexSettings, RaLMSpecSettings, RemoteSettings, SpecReasonSettings
from agentspec.runtime import Runtime
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ServerSettings
from agentspec.testing import Answer, FakeBackend, Script
from agentspec.types import GenerateRequest
from tests.thinking_model import ThinkingModel

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


def retrieving(path: Path, **knobs: Any) -> Settings:
    given: dict[str, Any] = {"base": "large", "knowledge": "words", **knobs}
    return Settings(
        backends={"large": TorchSettings(model="l")},
        models={"read": RaLMSpecSettings(**given), "plain": ModelSettings(backend="large")},
        knowledge={"words": IndexSettings(path=path)},
    )


def test_the_gateway_streams_verified_text_and_says_that_nothing_is_lost(gateway: Any, corpus: Path) -> None:
    running = gateway({"large": Reader()}, retrieving(corpus))
    answer = httpx.post(f"{running.url}/v1/chat/completions", json={**BODY, "stream": True})
    assert answer.headers["x-agentspec-lossless"].startswith("ralmspec; document_tokens=256")
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    said = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
    shown = events[-1]["speculation"]
    assert shown["lossy"] is False and shown["strategy"] == "ralmspec" and shown["steps"] == 6
    assert shown["batches"] <= shown["queries"] and 0 <= shown["hit_rate"] <= 1 and shown["strides"][0] == 0
    assert set(shown["seconds"]) == {"generate", "rolled_back", "retrieve", "verify", "encode"}
    off = httpx.post(f"{running.url}/v1/chat/completions", json=BODY, headers={"x-agentspec-speculation": "off"})
    assert off.json()["choices"][0]["message"]["content"] == said and len(said.split()) == 24
    assert off.json()["speculation"]["strides"] == [0] * 6
    assert "x-agentspec-lossless" in off.headers and "x-agentspec-lossy" not in off.headers


@pytest.mark.parametrize("placement", ["round_robin", "workflow"])
def test_the_rounds_of_an_answer_may_go_to_any_server_of_a_pool(gateway: Any, corpus: Path, placement: Any) -> None:
    """Of which one does not answer."""
    large = Reader()
    servers = [gateway({"l": large}, Settings(backends={"l": TorchSettings(model="l")})).url for _ in range(2)]
    urls = {f"s{number}": f"{url}/v1" for number, url in enumerate([*servers, "http://127.0.0.1:9"])}
    pool: dict[str, Any] = {
        "backends": {name: OpenAISettings(base_url=url, model="l") for name, url in urls.items()},  # type: ignore[arg-type]
        "models": {
            "large": ModelSettings(backends=tuple(urls), placement=placement),
            "read": RaLMSpecSettings(base="large", knowledge="words"),
        },
    }
    running = [gateway({"large": large}, retrieving(corpus)), gateway({}, retrieving(corpus).model_copy(update=pool))]
    answers = [httpx.post(f"{one.url}/v1/chat/completions", json=BODY, timeout=60).json() for one in running]
    one, other = (answer["choices"][0]["message"]["content"] for answer in answers)
    assert one == other and answers[1]["speculation"]["strategy"] == "ralmspec"


@pytest.fixture(scope="module")
def reading(shared_gateway: Any, corpus: Path) -> Any:
    return shared_gateway({"large": Reader()}, retrieving(corpus))


REFUSED = {
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "bad_words": ["no"],
    "min_tokens": 2,
    "prompt_logprobs": 1,
    "prediction": {"type": "content", "content": "it"},
}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        *(({name: value}, name) for name, value in REFUSED.items()),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        (
            {"messages": [{"role": "assistant", "content": "So"}], "continue_final_message": True},
            "continue_final_message",
        ),
    ],
)
def test_fields_that_retrieval_cannot_honour_are_refused(reading: Any, fields: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{reading.url}/v1/chat/completions", json={**BODY, **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_a_knowledge_base_that_is_down_is_a_bad_gateway(gateway: Any, corpus: Path) -> None:
    down = retrieving(corpus).model_copy(update={"knowledge": {"words": RemoteSettings(url="http://127.0.0.1:1")}})  # type: ignore[arg-type]
    running = gateway({"large": Reader()}, down)
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=BODY)
    assert answer.status_code == 502 and answer.json()["error"]["code"] == "knowledge_base_error"
    assert httpx.post(f"{running.url}/v1/chat/completions", json={**BODY, "model": "plain"}).status_code == 200


async def ask(runtime: Runtime) -> RetrievalSpeculation:
    from agentspec.types import GenerateRequest, SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=24)
    request = GenerateRequest("read", messages=BODY["messages"], sampling=sampling)  # type: ignore[arg-type]
    last = [delta async for delta in runtime.generate(request)][-1]
    assert isinstance(last.speculation, RetrievalSpeculation)
    return last.speculation


def test_a_model_without_token_ids_is_refused_at_the_start(corpus: Path) -> None:
    runtime = Runtime(retrieving(corpus), backends={"large": FakeBackend(capabilities=Capabilities())})
    with pytest.raises(ConfigurationError, match=r"models\.read\.base"):
        runtime.start()


def test_an_endpoint_that_is_down_is_left_for_the_first_request(corpus: Path) -> None:
    backend = OpenAIBackend(OpenAISettings(base_url="http://127.0.0.1:1/v1", model="l"))  # type: ignore[arg-type]
    runtime = Runtime(retrieving(corpus), backends={"large": backend})
    runtime.start()
    assert runtime.ready


@pytest.mark.parametrize(("knobs", "named"), [({"knowledge": "word"}, "did you mean 'words'"), ({"base": "x"}, "base")])
def test_names_that_lead_nowhere_are_refused(corpus: Path, knobs: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        retrieving(corpus, **knobs)


DOWN = OpenAISettings(base_url="http://127.0.0.1:9/v1", model="m")  # type: ignore[arg-type]


def settings(large: Any = DOWN, tiny: Any = DOWN, **knobs: Any) -> Settings:
    models = {
        "fast": SpecReasonSettings(base="large", small="tiny", **knobs),
        "reader": RaLMSpecSettings(base="large", knowledge="kb"),
        "plain": ModelSettings(backend="tiny"),
    }
    knowledge = {"kb": RemoteSettings(url="http://127.0.0.1:9")}  # type: ignore[arg-type]
    return Settings(backends={"large": large, "tiny": tiny}, models=models, knowledge=knowledge)


class Deaf(ThinkingModel):
    """Answers a message that it should continue, as endpoints do that ignore what they do not know."""

    def prompt_text(self, request: GenerateRequest) -> str:
        return super().prompt_text(replace(request, continue_final=False))


class Nowhere:
    metric = Bm25Metric()

    async def search(self, queries: Sequence[Query], count: int) -> SearchResult:
        return SearchResult("1", ((),) * len(queries))

    async def aclose(self) -> None: ...


@pytest.fixture
def serving(gateway: Any) -> Any:
    """An endpoint that continues messages, unless its model is of a kind that does not."""

    def serve(kind: type[ThinkingModel] = ThinkingModel) -> OpenAISettings:
        known = Capabilities(continue_final=True, logprobs=True)
        running = gateway({"m": kind(lambda thinking: "one\n\n", capabilities=known)})
        return OpenAISettings(base_url=f"{running.url}/v1", model="m")  # type: ignore[arg-type]

    return serve


def refused(configured: Settings) -> str:
    """Why a runtime with these settings does not start."""
    with pytest.raises(ConfigurationError) as caught:
        Runtime(configured, knowledge={"kb": Nowhere()}).start()
    return str(caught.value)


def test_an_endpoint_that_cannot_play_its_part_is_an_error_at_the_start(serving: Any) -> None:
    thinking = settings(serving(Deaf), serving())
    assert "name another model as base" in refused(thinking)
    assert "accepts no token ids" in refused(settings(serving(), serving()))


def numbered(word: str) -> Callable[[str], Script]:
    def next_step(thinking: str) -> Script:
        number = thinking.count("\n\n") + 1
        return f"{word} {number}.{' Answer: 4' if number == 2 else ''}\n\n"

    return next_step


def specreason(**knobs: Any) -> Settings:
    strategy = SpecReasonSettings(base="large", small="tiny", **knobs)
    backends = {"large": TorchSettings(model="l"), "tiny": TorchSettings(model="t")}
    return Settings(backends=backends, models={"fast": strategy, "plain": ModelSettings(backend="large")})


def models(**options: Any) -> dict[str, FakeBackend]:
    words = {"large": "base", "tiny": "small"}
    return {name: ThinkingModel(numbered(word), **options) for name, word in words.items()}


FAST = {"model": "fast", "messages": [{"role": "user", "content": "Two plus two?"}]}


def test_every_call_of_a_strategy_has_its_priority(gateway: Any) -> None:
    behind = models()
    running = gateway(behind, specreason())
    asked = {"x-agentspec-priority": "3"}
    assert httpx.post(f"{running.url}/v1/chat/completions", json=FAST, headers=asked).status_code == 200
    requests = [request for model in behind.values() for request in model.requests]
    assert {one.priority for one in requests} == {3}


def test_upstreams_are_asked_for_no_more_than_the_gateway_allows(gateway: Any) -> None:
    """Neither by a request, nor by the strategy's own steps, whose settings want more."""
    known = Capabilities(continue_final=True, logprobs=True)
    behind = models(capabilities=known)
    backends = {
        name: OpenAISettings(base_url=f"{gateway({'m': model}).url}/v1", model="m", server_kind="other")  # type: ignore[arg-type]
        for name, model in behind.items()
    }
    fast = SpecReasonSettings(base="large", small="tiny")
    running = gateway(
        {}, Settings(server=ServerSettings(max_output_tokens=100), backends=backends, models={"fast": fast})
    )
    url = f"{running.url}/v1/chat/completions"
    for field, value, param in (
        ("max_tokens", 101, "max_tokens"),
        ("max_completion_tokens", 10**9, "max_completion_tokens"),
        ("n", 9, "n"),
        ("chat_template_kwargs", {"loops": 10**9}, "chat_template_kwargs.loops"),
    ):
        refused = httpx.post(url, json={**FAST, field: value})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text
        if field in ("max_tokens", "chat_template_kwargs"):  # the same of Anthropic's API, by which nothing is bypassed
            for path in ("messages", "messages/count_tokens"):
                refused = httpx.post(f"{running.url}/v1/{path}", json={"max_tokens": 5, **FAST, field: value})
                assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text
    assert not any(request.template_arguments for model in behind.values() for request in model.requests)
    for model in behind.values():
        model.requests.clear()
    assert httpx.post(url, json={**FAST, "max_tokens": 100}, timeout=60).status_code == 200
    asked = [request.sampling.max_tokens for model in behind.values() for request in model.requests]
    assert max(one or 0 for one in asked) == 100
