"""Tools of the OpenAI Agents SDK that start before the model calls them: the transcripts stay the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from agents import (
    Agent,
    FunctionTool,
    ModelResponse,
    RawResponsesStreamEvent,
    RunConfig,
    RunContextWrapper,
    Runner,
    Tool,
    Usage,
    function_tool,
    tool_namespace,
)
from agents.testing import ScriptedModel, assistant_message, function_call
from agents.tool_context import ToolContext
from agents.tool_guardrails import ToolGuardrailFunctionOutput, tool_input_guardrail
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputItemAddedEvent

from agentspec.openai_agents import EarlyToolHooks, early_tools
from agentspec.tools import AgentCaller, AuditEvent, ToolCall, ToolPolicy, ToolSpeculator
from agentspec.tools.prediction.model import CallForecast, CallModel, CallPrediction
from agentspec.tools.prediction.observation import NAMED

pytestmark = pytest.mark.anyio

ran: list[tuple[str, bool]] = []
"""(tool, whether it ran before the model called it) of every run."""
called: set[tuple[str, str]] = set()
"""The (tool, order) of the model's latest answer."""
stock = {"#W1": 1, "#W2": 2}
QUIET = RunConfig(tracing_disabled=True)


def note(tool: str, order: str) -> None:
    ran.append((tool, (tool, order) not in called))


@function_tool
async def look(order: str) -> str:
    """Read an order."""
    note("look", order)
    if order not in stock:
        raise KeyError(order)
    return json.dumps({"order": order, "left": stock[order]})


@function_tool
def peek(order: str) -> str:
    """Read an order in a thread."""
    note("peek", order)
    return f"order {order} has {stock.get(order, 0)}"


@function_tool
async def buy(order: str) -> str:
    """Buy an order."""
    note("buy", order)
    stock[order] = stock.get(order, 0) - 1
    return "bought"


@function_tool
async def who(context: RunContextWrapper[Any], order: str) -> str:
    """Read with the run's context."""
    note("who", order)
    return f"{context.context} reads {order}"


class Model(ScriptedModel):
    """Answers by a script; before it does, what was started has the time to run."""

    async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
        await asyncio.sleep(0.001)
        response = await super().get_response(*args, **kwargs)
        calls = [item for item in response.output if isinstance(item, ResponseFunctionToolCall)]
        called.clear()
        called.update((call.name, json.loads(call.arguments)["order"]) for call in calls if "order" in call.arguments)
        return response


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.tools.launching.pays", lambda probability, *_: probability > 0.2)
    ran.clear()
    called.clear()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def asks(name: str, number: int = 0, **arguments: Any) -> list[Any]:
    return [function_call(name, arguments, call_id=f"c{number}")]


SCRIPT = (
    asks("look", order="#W1"),
    asks("buy", 1, order="#W2"),
    asks("look", 2, order="#W2"),
    asks("peek", 3, order="#W2"),
    [assistant_message("done")],
)
TOOLS: list[Tool] = [look, buy, peek, who]


def opened(*names: str) -> tuple[ToolSpeculator, list[AuditEvent]]:
    events: list[AuditEvent] = []
    return ToolSpeculator(ToolPolicy(names or ["look", "peek"]), on_event=events.append), events


async def converse(
    speculator: ToolSpeculator | None,
    session: str = "s",
    *,
    script: Sequence[Any] = SCRIPT,
    tools: Sequence[Tool] = TOOLS,
    stream: bool = False,
) -> list[Any]:
    """The transcript of a run, with early starts if there is a speculator."""
    stock.clear()
    stock.update({"#W1": 1, "#W2": 2})
    offered = list(tools) if speculator is None else early_tools(tools)
    agent: Agent[Any] = Agent(name="shop", model=Model(script), tools=offered)
    hooks = None if speculator is None else EarlyToolHooks(speculator, session=session)
    options: dict[str, Any] = {"context": "Ann", "hooks": hooks, "run_config": QUIET}
    if not stream:
        return (await Runner.run(agent, "look at #W1, please", **options)).to_input_list()
    streamed = Runner.run_streamed(agent, "look at #W1, please", **options)
    async for _ in streamed.stream_events():
        pass
    return streamed.to_input_list()


async def test_a_tool_starts_once_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is expected before the turn; the events of a streamed run tell the name."""
    named = CallPrediction(ToolCall("look", {"order": "#W1"}), 0.9, 0.9, NAMED)
    monkeypatch.setattr(CallModel, "predict", lambda *_: CallForecast((), ()))
    monkeypatch.setattr(CallModel, "predict_named", lambda *told: [named] if told[-1] == "look" else [])
    monkeypatch.setattr("agentspec.tools.learned.worthwhile", lambda found, *_: list(found))
    speculator, events = opened()
    hooks = EarlyToolHooks(speculator, session="s")
    script = (asks("look", order="#W1"), asks("buy", 1, order="#W2"), [assistant_message("done")])
    agent: Agent[Any] = Agent(name="shop", model=Model(script), tools=early_tools(TOOLS))
    streamed = Runner.run_streamed(agent, "look at #W1, please", hooks=hooks, run_config=QUIET)
    hooks.hears(None)
    async for event in streamed.stream_events():
        hooks.hears(event)
    assert {event.tool for event in events} <= {"look"} and all(event.named for event in events)
    assert [tool for tool, _ in ran].count("buy") == 1
    session = speculator.session(AgentCaller(agent="shop", session="s"))
    await session.abegin_turn(_looked)
    item = ResponseFunctionToolCall(name="look", arguments="", call_id="c", type="function_call")
    added = ResponseOutputItemAddedEvent(
        item=item, output_index=0, sequence_number=0, type="response.output_item.added"
    )
    hooks.hears(RawResponsesStreamEvent(data=added))
    call = ToolCall("look", {"order": "#W1"})
    session.end_turn([call])
    assert await session.arun(call, _looked) == "looked"
    assert [event.outcome for event in events][-2:] == ["launch", "hit"]
    speculator.close()


async def _looked(call: ToolCall) -> str:
    return "looked"


@pytest.fixture
def expect(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has a call of the tool, with the order #W1 unless told otherwise, predicted for every turn."""

    def expect(tool: str, order: str = "#W1") -> None:
        prediction = CallPrediction(ToolCall(tool, {"order": order}), 0.9, 0.9, 0)
        found = CallForecast((prediction,), ()), CallForecast((), ())
        monkeypatch.setattr(CallModel, "predict", lambda _model, _history, tools: found[tool not in tools])
        monkeypatch.setattr("agentspec.tools.learned.worthwhile", lambda found, *_: list(found))

    return expect


async def test_an_agent_that_has_learned_starts_only_what_is_listed() -> None:
    speculator, events = opened()
    plain = await converse(None)
    for number in range(3):
        ran.clear()
        assert await converse(speculator, f"t{number}") == plain
        assert {name for name, unasked in ran if unasked} <= {"look", "peek"}
        assert [name for name, _ in ran].count("buy") == 1
    assert {event.tool for event in events} <= {"look", "peek"} and "hit" in {event.outcome for event in events}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tool", ["look", "peek"])
async def test_an_early_start_is_used_for_the_identical_call(tool: str, stream: bool, expect: Any) -> None:
    script = (asks(tool, order="#W1"), [assistant_message("done")])
    speculator, events = opened()
    expect(tool)
    assert await converse(speculator, script=script, stream=stream) == await converse(None, script=script)
    assert [event.outcome for event in events][:2] == ["launch", "hit"] and {name for name, _ in ran} == {tool}


async def test_a_tool_that_writes_does_not_start_early_though_its_call_is_sure(expect: Any) -> None:
    speculator, events = opened()
    expect("buy")
    script = (asks("buy", order="#W1"), [assistant_message("done")])
    assert await converse(speculator, script=script) == await converse(None, script=script)
    assert ran == [("buy", False), ("buy", False)] and events == []


async def test_without_hooks_a_wrapped_tool_runs_as_ever() -> None:
    plain = await converse(None)
    assert await converse(None, tools=early_tools(TOOLS)) == plain


async def test_a_failure_is_never_shown_and_the_tool_runs_again(expect: Any) -> None:
    script = (asks("look", order="#W9"), [assistant_message("done")])
    plain = await converse(None, script=script)
    speculator, events = opened()
    expect("look", "#W9")
    assert await converse(speculator, script=script) == plain
    assert [event.outcome for event in events][:2] == ["launch", "failed"]


async def test_a_write_between_start_and_call_voids_the_result(expect: Any) -> None:
    script = (
        [function_call("buy", {"order": "#W1"}, call_id="a"), function_call("look", {"order": "#W1"}, call_id="b")],
        [assistant_message("done")],
    )
    speculator, events = opened()
    expect("look")
    assert await converse(speculator, script=script) == await converse(None, script=script)
    assert [event.outcome for event in events][:2] == ["launch", "stale"]


async def test_a_tool_that_takes_the_context_does_not_start_early(expect: Any) -> None:
    script = (asks("who", order="#W1"), [assistant_message("done")])
    speculator, events = opened("who")
    expect("who")
    assert await converse(speculator, script=script) == await converse(None, script=script)
    assert events == []


@tool_input_guardrail
def watched(data: Any) -> ToolGuardrailFunctionOutput:
    return ToolGuardrailFunctionOutput.allow()


def variant(**options: Any) -> FunctionTool:
    return function_tool(lambda order: order, name_override="read", **options)


async def raw(context: ToolContext[Any], arguments: str) -> str:
    return arguments


def test_what_somebody_has_a_say_in_is_left_as_it_is() -> None:
    by_hand = FunctionTool("raw", "", {"type": "object", "properties": {}}, raw)
    other: list[Tool] = [
        variant(needs_approval=True),
        variant(tool_input_guardrails=[watched]),
        variant(is_enabled=lambda *_: True),
        Agent(name="helper").as_tool("helper", "Helps."),
        by_hand,
        who,
    ]
    assert all(one is two for one, two in zip(early_tools(other), other, strict=True))
    (wrapped,) = early_tools([variant()])
    assert isinstance(wrapped, FunctionTool) and early_tools([wrapped]) == [wrapped]
    assert wrapped.params_json_schema == variant().params_json_schema


async def test_a_tool_that_is_left_as_it_is_counts_as_one_that_writes() -> None:
    speculator, _ = opened()
    hooks = EarlyToolHooks(speculator, session="s")
    agent: Agent[Any] = Agent(name="shop", tools=TOOLS)
    epoch = speculator.epochs.of("default", "s")
    before = epoch.number
    context = ToolContext(None, tool_name="buy", tool_call_id="c", tool_arguments="{}")
    await hooks.on_tool_start(context, agent, buy)
    assert not epoch.quiet
    await hooks.on_tool_end(context, agent, buy, "bought")
    assert epoch.quiet and epoch.number == before + 2


async def test_arguments_that_are_no_object_run_as_ever(expect: Any) -> None:
    script = ([function_call("look", "[1]", call_id="c")], [assistant_message("done")])
    speculator, events = opened()
    expect("look")
    assert await converse(speculator, script=script) == await converse(None, script=script)
    assert {event.outcome for event in events} == {"launch", "waste"}


async def test_tools_of_one_name_in_two_namespaces_are_two(expect: Any) -> None:
    @function_tool(name_override="look")
    async def other(order: str) -> str:
        """Read an order elsewhere."""
        return f"another {order}"

    (inside,) = tool_namespace(
        name="crm", description="Customers.", tools=cast("list[FunctionTool]", early_tools([other]))
    )
    speculator, events = opened()
    expect("look")
    hooks = EarlyToolHooks(speculator, session="n")
    agent: Agent[Any] = Agent(name="shop", tools=[*early_tools([look]), inside])
    run: Any = RunContextWrapper(context=None)
    await hooks.on_llm_start(run, agent, None, [{"role": "user", "content": "look at #W1, please"}])
    (call,) = asks("look", order="#W1")
    await hooks.on_llm_end(run, agent, ModelResponse([call], Usage(), None))
    arguments = json.dumps({"order": "#W1"})
    context = ToolContext(None, tool_name="look", tool_call_id="c", tool_arguments=arguments, tool_namespace="crm")
    await hooks.on_tool_start(context, agent, inside)
    assert await inside.on_invoke_tool(context, arguments) == "another #W1"
    assert [event.outcome for event in events] == ["launch"]


ORDERS = st.sampled_from(["#W1", "#W2", "#W9"])
READS = st.lists(st.tuples(st.sampled_from(["look", "peek", "who"]), ORDERS), min_size=1, max_size=2)
WRITES = st.lists(st.tuples(st.just("buy"), ORDERS), min_size=1, max_size=2)


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(turns=st.lists(READS | WRITES, max_size=4))
def test_any_agent_gets_the_same(turns: list[list[tuple[str, str]]]) -> None:
    script = [
        [function_call(name, {"order": order}, call_id=f"{n} {m}") for m, (name, order) in enumerate(calls)]
        for n, calls in enumerate(turns)
    ]
    script.append([assistant_message("done")])

    async def main() -> None:
        plain = await converse(None, script=script)
        speculator, events = opened()
        for number in range(4):
            assert await converse(speculator, str(number), script=script) == plain
        assert {event.tool for event in events} <= {"look", "peek"}

    asyncio.run(main())
