"""OpenAI's Agents SDK with its default model class, which speaks the Responses API; a script chooses the tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from agentspec.testing import Answer, FakeBackend
from agentspec.types import GenerateRequest

MODEL = "fake"
pytestmark = pytest.mark.slow


class Weather(BaseModel):
    place: str
    degrees: int


def called(name: str, **arguments: Any) -> Answer:
    function = {"name": name, "arguments": json.dumps(arguments)}
    calls = [{"index": 0, "id": f"call_{name}", "type": "function", "function": function}]
    thought = {"reasoning": "a tool will know", "reasoning_content": "a tool will know"}
    return Answer("", extra={**thought, "tool_calls": calls}, finish_reason="tool_calls")


def script(request: GenerateRequest) -> Any:
    """Calls the first tool there is; after its result, or without tools, answers."""
    messages = list(request.messages or ())
    if request.sampling.structured_outputs is not None:
        return json.dumps({"place": "Rome", "degrees": 21})
    results = [message["content"] for message in messages if message["role"] == "tool"]
    names = [tool["function"]["name"] for tool in request.tools]
    if "transfer_to_expert" in names:
        return called("transfer_to_expert")
    if "temperature" in names and "21" not in results:
        return called("temperature", place="Rome")
    return "It has 21 degrees." if "21" in results else "I do not know."


@pytest.fixture(scope="module")
def agents() -> Any:
    """The SDK, imported when needed: it takes seconds."""
    return pytest.importorskip("agents", reason="openai-agents is not installed")


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return FakeBackend(script)


@pytest.fixture(scope="module")
def url(shared_gateway: Any, backend: FakeBackend) -> str:
    return f"{shared_gateway({MODEL: backend}).url}/v1"


@pytest.fixture
async def provider(agents: Any, url: str) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield agents.OpenAIProvider(openai_client=client)


@pytest.fixture
def config(agents: Any, provider: Any) -> Any:
    return agents.RunConfig(model_provider=provider, tracing_disabled=True)


@pytest.fixture
def temperature(agents: Any) -> Any:
    def temperature(place: str) -> str:
        """The temperature of a place."""
        assert place == "Rome"
        return "21"

    return agents.function_tool(temperature)


@pytest.mark.anyio
async def test_the_default_model_class_speaks_responses(agents: Any, provider: Any) -> None:
    assert isinstance(provider.get_model(MODEL), agents.OpenAIResponsesModel)


@pytest.mark.anyio
async def test_a_tool_is_called(agents: Any, config: Any, temperature: Any, backend: FakeBackend) -> None:
    agent = agents.Agent(name="guide", instructions="be brief", model=MODEL, tools=[temperature])
    result = await agents.Runner.run(agent, "how warm is Rome?", run_config=config)
    assert result.final_output == "It has 21 degrees."
    system, user, turn, tool = backend.requests[-1].messages or ()
    assert (system["content"], user["content"], tool["content"]) == ("be brief", "how warm is Rome?", "21")
    assert turn["tool_calls"][0]["function"] == {"name": "temperature", "arguments": '{"place": "Rome"}'}
    assert turn["reasoning_content"] == "a tool will know"
    assert result.raw_responses[-1].usage.input_tokens > 0


@pytest.mark.anyio
async def test_streaming(agents: Any, config: Any, temperature: Any) -> None:
    agent = agents.Agent(name="guide", model=MODEL, tools=[temperature])
    result = agents.Runner.run_streamed(agent, "how warm is Rome?", run_config=config)
    events = [event async for event in result.stream_events()]
    raw = [event.data for event in events if event.type == "raw_response_event"]
    text = "".join(event.delta for event in raw if event.type == "response.output_text.delta")
    assert text == result.final_output == "It has 21 degrees."
    items = [event.item.type for event in events if event.type == "run_item_stream_event"]
    assert items == ["reasoning_item", "tool_call_item", "tool_call_output_item", "message_output_item"]


@pytest.mark.anyio
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_handoff(agents: Any, config: Any, temperature: Any, backend: FakeBackend, streamed: bool) -> None:
    expert = agents.Agent(name="expert", instructions="you know", model=MODEL, tools=[temperature])
    guide = agents.Agent(name="guide", model=MODEL, handoffs=[expert])
    if streamed:
        result = agents.Runner.run_streamed(guide, "how warm is Rome?", run_config=config)
        async for _ in result.stream_events():
            pass
    else:
        result = await agents.Runner.run(guide, "how warm is Rome?", run_config=config)
    assert result.final_output == "It has 21 degrees." and result.last_agent.name == "expert"
    assert (backend.requests[-1].messages or [{}])[0]["content"] == "you know"


@pytest.mark.anyio
async def test_structured_output(agents: Any, config: Any, backend: FakeBackend) -> None:
    agent = agents.Agent(name="guide", model=MODEL, output_type=Weather)
    result = await agents.Runner.run(agent, "how warm is Rome?", run_config=config)
    assert result.final_output == Weather(place="Rome", degrees=21)
    form = backend.requests[-1].sampling.structured_outputs
    assert form is not None and isinstance(form.json, dict) and set(form.json["properties"]) == {"place", "degrees"}


@pytest.mark.anyio
async def test_conversations_go_on_by_id(agents: Any, config: Any, backend: FakeBackend) -> None:
    agent = agents.Agent(name="guide", model=MODEL)
    first = await agents.Runner.run(agent, "one", run_config=config)
    await agents.Runner.run(agent, "two", previous_response_id=first.last_response_id, run_config=config)
    said = [message["content"] for message in backend.requests[-1].messages or ()]
    assert said == ["one", "I do not know.", "two"]
    result = [*first.to_input_list(), {"role": "user", "content": "two"}]
    await agents.Runner.run(agent, result, run_config=config)
    assert [message["content"] for message in backend.requests[-1].messages or ()] == said
