"""A strategy's model through the gateway, LangChain and steps; settings that cannot work are refused at the start."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.backends.base import Capabilities
from agentspec.backends.settings import OpenAISettings, TorchSettings
from agentspec.langchain import ChatAgentSpec
from agentspec.reasoning.settings import SpecReasonSettings, TraceSettings
from agentspec.runtime import Runtime
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ServerSettings
from agentspec.step import report, step
from agentspec.testing import Answer, FakeBackend, Script
from tests.thinking_model import ThinkingModel

THINKING = "small 1.\n\nsmall 2. Answer: 4\n\n"


def numbered(word: str) -> Callable[[str], Script]:
    def next_step(thinking: str) -> Script:
        number = thinking.count("\n\n") + 1
        return f"{word} {number}.{' Answer: 4' if number == 2 else ''}\n\n"

    return next_step


def settings(**knobs: Any) -> Settings:
    strategy = SpecReasonSettings(base="large", small="tiny", **knobs)
    backends = {"large": TorchSettings(model="l"), "tiny": TorchSettings(model="t")}
    return Settings(backends=backends, models={"fast": strategy, "plain": ModelSettings(backend="large")})


def models(**options: Any) -> dict[str, FakeBackend]:
    words = {"large": "base", "tiny": "small"}
    return {name: ThinkingModel(numbered(word), **options) for name, word in words.items()}


BODY = {"model": "fast", "messages": [{"role": "user", "content": "Two plus two?"}]}


def test_the_gateway_streams_thinking_then_the_answer(gateway: Any) -> None:
    running = gateway(models(), settings(threshold=6))
    answer = httpx.post(f"{running.url}/v1/chat/completions", json={**BODY, "stream": True})
    assert answer.headers["x-agentspec-lossy"] == "specreason; threshold=6.0"
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == THINKING
    assert "".join(delta.get("content") or "" for delta in deltas) == "The answer is four."
    told = events[-1]["speculation"]
    assert told["lossy"] is True and told["strategy"] == "specreason" and told["knobs"]["threshold"] == 6.0
    assert [model["id"] for model in httpx.get(f"{running.url}/v1/models").json()["data"]] == ["fast", "plain"]
    plain = httpx.post(f"{running.url}/v1/chat/completions", json={**BODY, "model": "plain"})
    assert "x-agentspec-lossy" not in plain.headers


def test_every_call_of_a_strategy_is_asked_for_its_time(gateway: Any) -> None:
    """Clients read the thoughts as they read the answer: what a stream should keep holds for both."""
    behind = models()
    running = gateway(behind, settings())
    asked = {"x-agentspec-latency-ms-per-token": "20", "x-agentspec-priority": "3"}
    assert httpx.post(f"{running.url}/v1/chat/completions", json=BODY, headers=asked).status_code == 200
    requests = [request for model in behind.values() for request in model.requests]
    assert {(one.latency_target_ms_per_token, one.priority) for one in requests} == {(20, 3)}


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
        refused = httpx.post(url, json={**BODY, field: value})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text
        if field in ("max_tokens", "chat_template_kwargs"):  # the same of Anthropic's API, by which nothing is bypassed
            for path in ("messages", "messages/count_tokens"):
                refused = httpx.post(f"{running.url}/v1/{path}", json={"max_tokens": 5, **BODY, field: value})
                assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text
    assert not any(request.template_arguments for model in behind.values() for request in model.requests)
    for model in behind.values():
        model.requests.clear()
    assert httpx.post(url, json={**BODY, "max_tokens": 100}, timeout=60).status_code == 200
    asked = [request.sampling.max_tokens for model in behind.values() for request in model.requests]
    assert max(one or 0 for one in asked) == 100


@pytest.fixture
def reset_report() -> Any:
    report().reset()
    yield
    report().reset()


def test_langchain_and_steps_reach_it(reset_report: None) -> None:
    fakes = models()
    runtime = Runtime(settings(), backends=fakes)

    @step("solve")
    def solve() -> Any:
        return ChatAgentSpec(model="fast", runtime=runtime, temperature=0).invoke("Two plus two?")

    @step("solve", model="fast")
    def plain() -> Any:
        return ChatAgentSpec(model="plain", runtime=runtime, temperature=0).invoke("Two plus two?")

    @step("solve", model="unheard of")
    def named() -> Any:
        return ChatAgentSpec(runtime=runtime).invoke("Two plus two?", model="fast")

    for other in (plain, named):
        assert other().response_metadata["model_name"] == "fast"
    report().reset()
    message = solve()
    assert message.content == "The answer is four."
    assert message.additional_kwargs["reasoning_content"] == THINKING
    told = message.response_metadata["speculation"]
    assert told["lossy"] and told["strategy"] == "specreason"
    assert {request.labels.step for request in fakes["tiny"].requests} == {"solve"}
    assert next(row for row in report() if row.step == "solve").calls == 1


@pytest.mark.parametrize(("threshold", "word"), [(9.5, "base"), (0, "small")])
def test_above_nine_and_at_zero_one_model_thinks_alone(
    gateway: Any, reset_report: None, threshold: float, word: str
) -> None:
    def alone(thinking: str, role: str) -> Script:
        number = thinking.count("\n\n") + 1
        return f"{role} {number} of \N{ROMAN NUMERAL FOUR}.{' Answer: 4' if number == 4 else ''}\n\n"

    fakes: dict[str, FakeBackend] = {
        name: ThinkingModel(lambda thinking, role=role: alone(thinking, role), score=lambda step: "9")  # type: ignore[misc]
        for name, role in (("large", "base"), ("tiny", "small"))
    }
    wanted = ""
    while "Answer" not in wanted:
        wanted += str(alone(wanted, word))
    running = gateway(fakes, settings(threshold=threshold))
    body = httpx.post(f"{running.url}/v1/chat/completions", json={**BODY, "temperature": 0}).json()
    message = body["choices"][0]["message"]
    assert message["reasoning"].encode() == wanted.encode()
    through = ChatAgentSpec(model="fast", base_url=f"{running.url}/v1", temperature=0)

    @step("solve", model="fast")
    def solve() -> Any:
        return ChatAgentSpec(model="plain", base_url=f"{running.url}/v1", temperature=0).invoke("Two plus two?")

    for said in (through.invoke("Two plus two?"), solve()):
        assert said.additional_kwargs["reasoning_content"].encode() == wanted.encode()
        assert said.response_metadata["speculation"]["kept_tokens"][{"base": "small", "small": "base"}[word]] == 0


def test_through_two_gateways(gateway: Any) -> None:
    """The models are other gateways, reached over HTTP by continuing messages."""
    abilities = Capabilities(continue_final=True, logprobs=True)
    base, small = models(capabilities=abilities).values()
    servers = [gateway({"m": fake}) for fake in (base, small)]
    large, tiny = (OpenAISettings(base_url=f"{server.url}/v1", model="m") for server in servers)  # type: ignore[arg-type]
    fast = SpecReasonSettings(base="large", small="tiny")
    front = gateway({}, Settings(backends={"large": large, "tiny": tiny}, models={"fast": fast}))
    answer = httpx.post(f"{front.url}/v1/chat/completions", json=BODY).json()
    assert answer["choices"][0]["message"]["reasoning"] == THINKING
    assert answer["choices"][0]["message"]["content"] == "The answer is four."
    through = ChatAgentSpec(model="fast", base_url=f"{front.url}/v1").invoke("Two plus two?")
    assert through.response_metadata["speculation"]["strategy"] == "specreason"


def test_tools_reach_the_base_model_behind_the_thinking() -> None:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    base = ThinkingModel(
        numbered("base"),
        capabilities=Capabilities(continue_final=True, logprobs=True),
        answer=Answer(extra={"tool_calls": [call]}, finish_reason="tool_calls"),
    )
    endpoint = OpenAISettings(base_url="http://127.0.0.1:9/v1", model="m")  # type: ignore[arg-type]
    fast = SpecReasonSettings(base="large", small="tiny")
    configured = Settings(backends={"large": endpoint, "tiny": endpoint}, models={"fast": fast})
    runtime = Runtime(configured, backends={"large": base, "tiny": ThinkingModel(numbered("small"))})
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    message = ChatAgentSpec(model="fast", runtime=runtime).bind(tools=[tool], response_format={"type": "x"}).invoke("?")
    assert message.tool_calls[0]["name"] == "add"
    thinking, *_, answer = (request for request in base.requests if "tools" in request.extra)
    assert thinking.sampling.max_tokens == 1 and "response_format" not in thinking.extra  # the judge's question
    assert answer.extra["response_format"] == {"type": "x"} and answer.continue_final


def test_traces_are_kept_where_asked_and_only_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.reasoning.delegation.trace.KEPT", 2)
    configured = settings().model_copy(update={"traces": TraceSettings(path=tmp_path / "traces")})
    runtime = Runtime(configured, backends=models())
    model = ChatAgentSpec(model="fast", runtime=runtime)
    ids = [model.invoke("Two?").response_metadata["speculation"]["trace"] for _ in range(3)]
    assert len(list((tmp_path / "traces").iterdir())) == 2 and len(set(ids)) == 3
    assert model.invoke("Two?", store=False).response_metadata["speculation"]["trace"] is None
    lines = [json.loads(line) for line in (tmp_path / "traces" / f"{ids[-1]}.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines][:3] == ["head", "proposed", "scored"]
    assert lines[-1]["text"] == "The answer is four."
    assert (tmp_path / "traces").stat().st_mode & 0o077 == 0
