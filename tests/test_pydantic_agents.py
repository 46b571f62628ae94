"""Tools of Pydantic AI that start before the model calls them: the transcripts stay the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip(
    "pydantic_ai", reason="pydantic-ai is not installed; `.ci/clients-env` makes an environment with it"
)

from pydantic_ai import Agent, RunContext, TextOutput, Tool
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.messages import ModelMessage, ModelResponse, NativeToolCallPart, TextPart, ToolCallPart, UserPromptPart
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, FunctionModel
from pydantic_ai.toolsets import FunctionToolset, WrapperToolset

from agentspec.pydantic_agents import EarlyToolCapability
from agentspec.tools import AuditEvent, LaunchLimits, ToolCall, ToolPolicy, ToolSpeculator
from agentspec.tools.prediction.model import CallForecast, CallModel, CallPrediction

pytestmark = pytest.mark.anyio

ran: list[str] = []
stock = {"#W1": 1, "#W2": 2}


async def look(order: str, detail: bool = False) -> str:
    """Read an order."""
    ran.append("look")
    return json.dumps({"order": order, "left": stock[order], "detail": detail})


def peek(order: str) -> dict[str, int]:
    """Read an order in a thread."""
    ran.append("peek")
    return {"left": stock[order]}


def sell(order: str) -> str:
    """Sell one."""
    ran.append("sell")
    stock[order] -= 1
    return "sold"


def mine(ctx: RunContext[Any], order: str) -> str:
    """Read an order of the person that the run is for."""
    ran.append("mine")
    return f"{order} of {ctx.deps}"


TOOLS: list[Any] = [look, peek, sell, mine]
EARLY = ("look", "peek", "mine")


@pytest.fixture(autouse=True)
def fresh() -> None:
    ran.clear()
    stock.update({"#W1": 1, "#W2": 2})


@pytest.fixture
def expect(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let every turn be expected to make exactly these calls."""

    def expect(*calls: ToolCall) -> None:
        forecast = CallForecast(tuple(CallPrediction(call, 0.9, 0.9, 0) for call in calls), ())
        monkeypatch.setattr(CallModel, "predict", lambda *_: forecast)
        monkeypatch.setattr("agentspec.tools.learned.worthwhile", lambda found, *_: list(found))

    return expect


def scripted(*turns: Sequence[ToolCall]) -> FunctionModel:
    """A model that makes these calls in its turns, and then answers with what the last tools returned."""

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        done = sum(isinstance(message, ModelResponse) for message in messages)
        if done < len(turns):
            return ModelResponse(parts=[ToolCallPart(call.name, dict(call.arguments)) for call in turns[done]])
        return ModelResponse(
            parts=[TextPart("; ".join(str(getattr(one, "content", "")) for one in messages[-1].parts))]
        )

    async def stream(messages: list[ModelMessage], info: AgentInfo) -> Any:
        for at, part in enumerate(answer(messages, info).parts):
            if isinstance(part, ToolCallPart):
                yield {at: DeltaToolCall(part.tool_name, part.args_as_json_str(), tool_call_id=part.tool_call_id)}
            else:
                yield part.content

    return FunctionModel(answer, stream_function=stream)


async def transcript(
    model: FunctionModel, early: bool, tools: Sequence[Any] = (), toolsets: Sequence[Any] = ()
) -> tuple[list[Any], list[str]]:
    """What a run sends and gets, and the outcomes of early starts."""
    events: list[AuditEvent] = []
    speculator = ToolSpeculator(ToolPolicy(EARLY, trusted_servers=["shop"]), on_event=events.append)
    servers = {"shop": toolsets[0]} if toolsets else {}
    capabilities = [EarlyToolCapability(speculator, servers=servers)] if early else []
    agent = Agent(model, tools=tools or TOOLS, toolsets=toolsets, capabilities=capabilities, deps_type=str, name="shop")
    try:
        done = await agent.run("where is #W1?", deps="ann")
    finally:
        speculator.close()
    parts = [part for message in done.all_messages() for part in message.parts]
    return [(type(part).__name__, getattr(part, "content", "")) for part in parts], [event.outcome for event in events]


LOOK = ToolCall("look", {"order": "#W1"})


@pytest.mark.parametrize("name", ["look", "peek"])
async def test_a_predicted_call_is_started_and_its_result_used(expect: Callable[..., None], name: str) -> None:
    call = ToolCall(name, {"order": "#W1"})
    expect(call)
    early, outcomes = await transcript(scripted([call]), True)
    assert outcomes[:2] == ["launch", "hit"] and ran[0] == name
    assert early == (await transcript(scripted([call]), False))[0]


async def test_a_call_that_the_model_broke_off_ends_no_early_starts(expect: Callable[..., None]) -> None:
    """It stays in the conversation: what is told of later turns goes on behind it."""
    expect(LOOK)

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        done = sum(isinstance(message, ModelResponse) for message in messages)
        turns = [ToolCallPart("look", '{"order": '), ToolCallPart("look", '{"order": "#W1"}'), TextPart("done")]
        return ModelResponse(parts=[turns[done]])

    _, outcomes = await transcript(FunctionModel(answer), True)
    assert "hit" in outcomes


async def test_what_was_sold_meanwhile_is_read_anew(expect: Callable[..., None]) -> None:
    expect(LOOK)
    turns = [ToolCall("sell", {"order": "#W1"})], [LOOK]
    early, outcomes = await transcript(scripted(*turns), True)
    stock["#W1"] = 1
    assert early == (await transcript(scripted(*turns), False))[0]
    assert "stale" in outcomes and '"left": 0' in str(early)


def sell_one(order: str) -> str:
    """Sell one, and end."""
    return sell(order)


UNKNOWN: dict[str, tuple[list[Any], Any]] = {
    "a function that is an output": ([ToolCallPart("final_result", {"order": "#W1"})], sell_one),
    "a function of the output's text": ([TextPart("#W1")], TextOutput(sell_one)),
    "a tool of the provider": ([NativeToolCallPart("code_execution", {}), TextPart("done")], str),
    "a tool that there is not": ([ToolCallPart("far", {})], str),
}


@pytest.mark.parametrize(("parts", "output"), UNKNOWN.values(), ids=UNKNOWN)
async def test_what_may_have_changed_something_voids_what_waits(
    expect: Callable[..., None], parts: list[Any], output: Any
) -> None:
    """Between two runs of a conversation too."""
    expect(LOOK)
    events: list[AuditEvent] = []
    speculator = ToolSpeculator(ToolPolicy(EARLY), on_event=events.append)

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        done = sum(isinstance(message, ModelResponse) for message in messages)
        return ModelResponse(parts=[TextPart("there")] if done else parts)

    capability = EarlyToolCapability(speculator)
    first: Agent[Any, Any] = Agent(
        FunctionModel(answer), tools=[look], output_type=output, capabilities=[capability], name="shop"
    )
    before = (await first.run("sell #W1", conversation_id="c")).all_messages()
    made = sum(isinstance(message, ModelResponse) for message in before)
    model = scripted(*[[]] * made, [LOOK])
    second: Agent[Any, Any] = Agent(model, tools=[look], capabilities=[capability], name="shop")
    said = (await second.run("where is #W1?", message_history=before, conversation_id="c")).output
    speculator.close()
    assert f'"left": {stock["#W1"]}' in said
    assert [event.outcome for event in events][:2] == ["launch", "stale"]


REFUSED: dict[str, Any] = {
    "writes": (ToolCall("sell", {"order": "#W1"}), TOOLS),
    "takes the run's context": (ToolCall("mine", {"order": "#W1"}), TOOLS),
    "has a prepare": (LOOK, [Tool(look, prepare=lambda ctx, about: about)]),
    "runs alone": (LOOK, [Tool(look, sequential=True)]),
    "has a validator": (LOOK, [Tool(look, args_validator=lambda ctx, order, detail=False: None)]),
    "says that it needs approval": (LOOK, [Tool(look, metadata={"needs_approval": True})]),
}


@pytest.mark.parametrize(("call", "tools"), REFUSED.values(), ids=REFUSED)
async def test_what_may_not_run_early_never_does(expect: Callable[..., None], call: ToolCall, tools: list[Any]) -> None:
    expect(call)
    early, outcomes = await transcript(scripted([call]), True, tools)
    assert not outcomes and ran == [call.name]
    stock["#W1"] = 1
    assert early == (await transcript(scripted([call]), False, tools))[0]


@pytest.mark.parametrize("hint", [True, False])
async def test_the_metadata_of_a_trusted_servers_tools_counts(expect: Callable[..., None], hint: bool) -> None:
    """As the MCP toolset tells a server's hints."""

    async def far(order: str) -> str:
        ran.append("far")
        return order

    call = ToolCall("far", {"order": "#W1"})
    expect(call)
    toolset = FunctionToolset([Tool(far, metadata={"annotations": {"readOnlyHint": hint, "idempotentHint": True}})])
    _, outcomes = await transcript(scripted([call]), True, toolsets=[toolset])
    assert outcomes[:2] == (["launch", "hit"] if hint else [])


@pytest.mark.parametrize("options", [None, {"elicitation_handler": print}, {"log_handler": print}, {}])
async def test_a_server_that_may_ask_or_tell_somebody_is_not_called_early(
    expect: Callable[..., None], options: dict[str, Any] | None
) -> None:
    """The SDK keeps what a server may ask for where this class has it; None for a client that was made elsewhere."""

    class Server(FunctionToolset[Any]):  # type: ignore[misc]
        client = sampling_model = None
        _client_options = options

    async def far(order: str) -> str:
        return order

    call = ToolCall("far", {"order": "#W1"})
    expect(call)
    toolset = Server([Tool(far, metadata={"annotations": {"readOnlyHint": True}})])
    _, outcomes = await transcript(scripted([call]), True, toolsets=[toolset])
    assert bool(outcomes) == (options == {})


async def test_arguments_that_a_hook_changed_are_run_as_they_are(expect: Callable[..., None]) -> None:
    class Other(AbstractCapability[Any]):  # type: ignore[misc]
        async def before_tool_execute(self, ctx: Any, *, args: dict[str, Any], **_: Any) -> dict[str, Any]:
            return {**args, "order": "#W2"}

    expect(LOOK)
    speculator = ToolSpeculator(ToolPolicy(EARLY))
    agent = Agent(scripted([LOOK]), tools=[look], capabilities=[EarlyToolCapability(speculator), Other()])
    assert '"order": "#W2"' in (await agent.run("where is #W1?")).output
    speculator.close()


async def test_a_toolset_of_the_users_runs_in_the_agents_loop(expect: Callable[..., None]) -> None:
    """Its connections and locks may belong to it, also where the function blocks."""
    loops = []

    class Counted(WrapperToolset[Any]):  # type: ignore[misc]
        async def call_tool(self, *call: Any) -> Any:
            loops.append(asyncio.get_running_loop())
            return await super().call_tool(*call)

    call = ToolCall("peek", {"order": "#W1"})
    expect(call)
    _, outcomes = await transcript(scripted([call]), True, [look], [Counted(FunctionToolset([peek]))])
    assert outcomes[:2] == ["launch", "hit"] and set(loops) == {asyncio.get_running_loop()}


async def test_streamed_runs_start_tools_too(expect: Callable[..., None]) -> None:
    expect(LOOK)
    events: list[AuditEvent] = []
    speculator = ToolSpeculator(ToolPolicy(EARLY), on_event=events.append)
    agent = Agent(scripted([LOOK]), tools=[look], capabilities=[EarlyToolCapability(speculator)])
    async with agent.run_stream("where is #W1?") as streamed:
        assert '"left": 1' in await streamed.get_output()
    speculator.close()
    assert [event.outcome for event in events][:2] == ["launch", "hit"]


async def test_calls_are_learned_from_earlier_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.tools.launching.pays", lambda *_: True)  # however fast this machine is

    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        last = messages[-1].parts[-1]
        if isinstance(last, UserPromptPart):
            return ModelResponse(parts=[ToolCallPart("look", {"order": str(last.content).split()[-1]})])
        return ModelResponse(parts=[TextPart("there")])

    events: list[AuditEvent] = []
    limits = LaunchLimits(cost_weight=0.0)
    speculator = ToolSpeculator(ToolPolicy(EARLY), limits=limits, on_event=events.append)

    async def slow(order: str) -> str:
        """Read an order."""
        await asyncio.sleep(0.005)
        return order

    agent = Agent(
        FunctionModel(answer), tools=[Tool(slow, name="look")], capabilities=[EarlyToolCapability(speculator)]
    )
    for number in range(8):
        await agent.run(f"where is #W{100 + number}")
    speculator.close()
    assert sum(event.outcome == "hit" for event in events) >= 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_starts_once_it_is_named(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    named = CallPrediction(LOOK, 0.9, 0.9, 0)
    monkeypatch.setattr(CallModel, "predict", lambda *_: CallForecast((), ()))
    monkeypatch.setattr(CallModel, "predict_named", lambda *_: [named] if _[-1] == "look" else [])
    monkeypatch.setattr("agentspec.tools.learned.worthwhile", lambda found, *_: list(found))
    events: list[AuditEvent] = []
    written: list[int] = []

    async def answer(messages: list[ModelMessage], info: AgentInfo) -> Any:
        if isinstance(messages[-1].parts[-1], UserPromptPart):
            yield {0: DeltaToolCall(name="look", json_args="", tool_call_id="1")}
            await asyncio.sleep(0.01)
            written.append(len(events))
            yield {0: DeltaToolCall(json_args=json.dumps(LOOK.arguments))}
        else:
            yield "there"

    def whole(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        asked = isinstance(messages[-1].parts[-1], UserPromptPart)
        return ModelResponse(parts=[ToolCallPart("look", dict(LOOK.arguments)) if asked else TextPart("there")])

    speculator = ToolSpeculator(ToolPolicy(EARLY), on_event=events.append)
    capability = EarlyToolCapability(speculator, stream=stream)
    agent = Agent(FunctionModel(whole, stream_function=answer), tools=[look], capabilities=[capability])
    assert (await agent.run("where is #W1?")).output == "there"
    speculator.close()
    assert [event.outcome for event in events] == (["launch", "hit"] if stream else []) and written == [1] * stream
