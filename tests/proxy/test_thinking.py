"""A strategy's model through the gateway, LangChain and steps; settings that cannot work are refused at the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agentspec.backends.base import Capabilities
from agentspec.backends.settings import OpenAISettings, TorchSettings
from agentspec.langchain import ChatAgentSpec
from agentspec.reasoning.settings import SpecReasonSettings
from agentspec.runtime import Runtime
from agentspec.settings.load import ModelSettings, Settings
from agentspec.settings.server import ServerSettings
from agentspec.step import report, step
from agentspec.testing import FakeBackend, Script
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
