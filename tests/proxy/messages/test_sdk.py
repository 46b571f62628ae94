"""The unmodified client of Anthropic, against a model of this process, a scripted backend, and scripted upstreams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from agentspec.testing import Answer, FakeBackend
from agentspec.types import Usage

WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = {
    "index": 0,
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
}
ASKED = [{"role": "user", "content": "Hello"}]


def client_of(running: Any, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=running.url, api_key=key, max_retries=0, timeout=60)


def ask(client: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    return client.messages.create(**{"model": "m", "max_tokens": 50, "messages": ASKED, **fields})


@pytest.fixture
def scripted(gateway: Any, closing: Any) -> Any:
    """A gateway whose model "m" answers from a script, its client, and the backend."""

    def start(*script: Any, **server: Any) -> tuple[anthropic.Anthropic, FakeBackend]:
        backend = FakeBackend(*script)
        return closing(client_of(gateway({"m": backend}, **server))), backend

    return start


def test_a_message(scripted: Any) -> None:
    client, backend = scripted(Answer("Hi there.", usage=Usage(9, 3, cached_tokens=4)))
    message = ask(client, system=[{"type": "text", "text": "Be brief."}], extra_body={"temperature": 0.5, "top_k": 4})
    assert [block.model_dump(exclude_none=True) for block in message.content] == [{"type": "text", "text": "Hi there."}]
    assert (message.stop_reason, message.model, message.role) == ("end_turn", "m", "assistant")
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (5, 4)
    assert message._request_id
    [request] = backend.requests
    assert request.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.max_tokens) == (0.5, 4, 50)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called_and_its_result_comes_back(scripted: Any, stream: bool) -> None:
    client, backend = scripted(Answer("I look.", extra={"tool_calls": [CALL]}, finish_reason="tool_calls"), "Sunny.")
    call = {"model": "m", "max_tokens": 50, "messages": ASKED, "tools": [WEATHER]}
    if stream:
        with client.messages.stream(**call) as events:
            message = events.get_final_message()
    else:
        message = client.messages.create(**call)
    text, used = message.content
    assert text.text == "I look." and message.stop_reason == "tool_use"
    assert (used.id, used.name, used.input) == ("call_1", "get_weather", {"city": "Rome"})
    result = {"type": "tool_result", "tool_use_id": used.id, "content": [{"type": "text", "text": "25 C"}]}
    history = [*ASKED, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert ask(client, messages=history, tools=[WEATHER]).content[0].text == "Sunny."
    sent = backend.requests[1].messages
    assert sent[1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    assert sent[2] == {"role": "tool", "tool_call_id": "call_1", "content": "25 C"}


def test_thoughts_are_blocks_and_may_come_back(scripted: Any) -> None:
    thought = {"reasoning_content": "Hm.", "reasoning": "Hm."}
    client, backend = scripted(lambda request: Answer("Yes.", extra=thought))
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive", "budget_tokens": 9}):
        message = ask(client, thinking=thinking)
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.content[0].thinking == "Hm." and message.content[0].signature
    ask(client, messages=[*ASKED, {"role": "assistant", "content": message.content}, *ASKED])
    assert backend.requests[-1].messages[1]["reasoning_content"] == "Hm."
    assert [block.type for block in ask(client, thinking={"type": "disabled"}).content] == ["text"]
    assert backend.requests[0].template_arguments == {"enable_thinking": True}
    assert backend.requests[-1].template_arguments == {"enable_thinking": False}
    assert [request.thinking_budget for request in backend.requests] == [1024, 9, None, None]


@pytest.mark.parametrize("stream", [False, True])
def test_the_stop_sequence_that_ended_the_answer_is_told(scripted: Any, stream: bool) -> None:
    client, _ = scripted("one two three four")
    if stream:
        with client.messages.stream(model="m", max_tokens=9, messages=ASKED, stop_sequences=["xx", " three"]) as events:
            message = events.get_final_message()
    else:
        message = ask(client, stop_sequences=["xx", " three"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " three")
    assert message.content[0].text == "one two"


def test_errors_are_those_of_anthropics_api(scripted: Any) -> None:
    client, _ = scripted("ok")
    with pytest.raises(anthropic.BadRequestError) as bad:
        ask(client, messages=[{"role": "user", "content": [{"type": "video", "source": {}}]}])
    assert bad.value.body["type"] == "error" and bad.value.body["error"]["type"] == "invalid_request_error"
    assert bad.value.body["error"]["param"] == "messages[0].content[0].type" and bad.value.body["request_id"]
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(client, model="other")
    assert missing.value.body["error"]["type"] == "not_found_error"


@pytest.fixture(scope="module")
def tiny(tiny_model: Any, shared_gateway: Any) -> Iterator[tuple[anthropic.Anthropic, str]]:
    from agentspec.backends.settings import TorchSettings
    from agentspec.backends.torch import TorchBackend

    backend = TorchBackend.load(TorchSettings(model=str(tiny_model), max_active=2))
    with client_of(shared_gateway({"m": backend})) as client:
        yield client, "m"


def test_a_model_of_this_process(tiny: tuple[anthropic.Anthropic, str]) -> None:
    client, _ = tiny
    greedy = {"temperature": 0}
    whole = ask(client, extra_body=greedy, max_tokens=12)
    with client.messages.stream(model="m", max_tokens=12, messages=ASKED, extra_body=greedy) as stream:
        streamed = stream.get_final_message()
    assert whole.content[0].text == streamed.content[0].text and whole.usage.output_tokens <= 12
    counted = client.messages.count_tokens(model="m", messages=ASKED)
    assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_a_strategy_answers_and_counts(gateway: Any, closing: Any) -> None:
    from agentspec.backends.settings import TorchSettings
    from agentspec.reasoning.settings import SpecReasonSettings
    from agentspec.settings.load import Settings
    from tests.thinking_model import ThinkingModel

    def step(thinking: str) -> str:
        return "One. Answer: 4\n\n"

    local = {"large": TorchSettings(model="l"), "tiny": TorchSettings(model="t")}
    strategy = SpecReasonSettings(base="large", small="tiny")
    running = gateway({name: ThinkingModel(step) for name in local}, Settings(backends=local, models={"m": strategy}))
    client = closing(client_of(running))
    with client.messages.with_streaming_response.create(
        model="m", max_tokens=500, messages=ASKED, stream=True, thinking={"type": "enabled", "budget_tokens": 100}
    ) as response:
        assert response.headers["x-agentspec-lossy"].startswith("specreason")
        kinds = [event.content_block.type for event in response.parse() if event.type == "content_block_start"]
    assert kinds == ["thinking", "text"]
    assert client.messages.count_tokens(model="m", messages=ASKED).input_tokens > 0
