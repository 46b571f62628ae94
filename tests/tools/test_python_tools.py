"""Agents in plain Python: functions marked as tools, run by `agent_tools` around any chat model."""

from __future__ import annotations

import asyncio
import datetime
import json
import threading
from functools import partial
from typing import Any

import pytest
from pydantic import BaseModel

import agentspec
from agentspec.errors import ConfigurationError, InvalidRequestError
from agentspec.step.decorator import step
from agentspec.step.scope import current_labels
from agentspec.tools import AuditEvent, LaunchLimits, ToolCall, ToolSpeculator
from agentspec.tools.prediction.model import CallForecast, CallModel, CallPrediction
from agentspec.tools.prediction.observation import NAMED
from agentspec.tools.python_tools import AgentTools, PythonTool, agent_tools, tool

ran: list[str] = []
bought: list[str] = []


@tool(read_only=True, max_age=10)
def look(order: str, full: bool = False) -> dict[str, Any]:
    """Read an order."""
    ran.append("look")
    return {"order": order, "full": full, "bought": len(bought)}


@agentspec.tool
def buy(order: str) -> str:
    """Buy an order."""
    bought.append(order)
    return "done"


@tool(read_only=True)
async def slowly(order: str) -> str:
    """Read an order later."""
    await asyncio.sleep(0)
    return f"read {order}"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.tools.launching.pays", lambda probability, *_: probability > 0.2)
    ran.clear()
    bought.clear()


def message(*calls: ToolCall) -> dict[str, Any]:
    made = [
        {"id": f"c{n}", "type": "function", "function": {"name": one.name, "arguments": json.dumps(one.arguments)}}
        for n, one in enumerate(calls)
    ]
    return {"role": "assistant", "content": None, "tool_calls": made}


def converse(tools: AgentTools | None, number: int) -> list[dict[str, Any]]:
    """The messages of a session in which the model looks, buys and looks again."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": f"order #W{number}"}]}]
    functions: dict[str, Any] = {"look": look, "buy": buy}
    order = {"order": f"#W{number}"}
    for call in (ToolCall("look", order), ToolCall("buy", order), ToolCall("look", order), None):
        answer = message(call) if call else {"role": "assistant", "content": "done"}
        if tools is None:
            results = [("c0", functions[call.name](**call.arguments))] if call else []
        else:
            tools.before_model(messages)
            results = [(id, tools.run(made)) for id, made in tools.after_model(answer)]
        messages.append(answer)
        messages += ({"role": "tool", "tool_call_id": id, "content": json.dumps(result)} for id, result in results)
    return messages


class Held:
    """A message as the OpenAI client holds it."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def model_dump(self) -> dict[str, Any]:
        return self._fields


def test_a_conversation_may_hold_the_clients_objects(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever appends `response.choices[0].message` has them among dictionaries."""
    with agent_tools([look, buy], session="held", speculator=ToolSpeculator()) as tools:
        answer = Held(message(ToolCall("look", {"order": "#W1"})))
        asked = [{"role": "user", "content": "order #W1"}]
        tools.before_model(asked)
        [(id, call)] = tools.after_model(answer)
        tools.before_model([*asked, answer, {"role": "tool", "tool_call_id": id, "content": "seen"}])
        history = tools._session._history
    assert not caplog.records
    assert list(history.made) == [call.identity] and history.last_event == "look"


def test_an_agent_gets_the_same_with_early_starts() -> None:
    events: list[AuditEvent] = []
    speculator = ToolSpeculator(on_event=events.append)
    for number in range(100, 110):
        bought.clear()
        with agent_tools([look, buy], session=str(number), speculator=speculator) as tools:
            found = converse(tools, number)
        bought.clear()
        assert found == converse(None, number)
    assert {event.tool for event in events} == {"look"} and "hit" in {event.outcome for event in events}


def test_a_tool_is_a_function_still() -> None:
    assert look("#W1") == {"order": "#W1", "full": False, "bought": 0} and look.__doc__ == "Read an order."
    assert buy("#W1") == "done" and bought == ["#W1"]
    assert look.definition["function"] == {
        "name": "look",
        "description": "Read an order.",
        "parameters": {
            "type": "object",
            "properties": {
                "order": {"title": "Order", "type": "string"},
                "full": {"default": False, "title": "Full", "type": "boolean"},
            },
            "required": ["order"],
        },
    }


@pytest.mark.anyio
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_step_above_or_below_stays_a_tool(asynchronous: bool) -> None:
    async def awaited(order: str) -> str:
        return f"{order} in {current_labels().step}"

    def plain(order: str) -> str:
        return f"{order} in {current_labels().step}"

    function: Any = awaited if asynchronous else plain
    call = ToolCall(function.__name__, {"order": "#W1"})
    for stepped in (step("shop")(tool(read_only=True)(function)), tool(read_only=True)(step("shop")(function))):
        with agent_tools([stepped], session="s") as tools:
            assert tools.definitions == [tool(function).definition]
            assert (await tools.arun(call) if asynchronous else tools.run(call)) == "#W1 in shop"
            assert stepped.read_only


async def run(number: int, speculator: ToolSpeculator) -> str:
    call = ToolCall("slowly", {"order": f"#W{number}"})
    with agent_tools([slowly, look], session=str(number), speculator=speculator) as tools:
        await tools.abefore_model([{"role": "user", "content": f"order #W{number}"}])
        tools.after_model(message(call))
        await asyncio.sleep(0.001)
        assert (await tools.arun(ToolCall("look", {"order": "x"})))["order"] == "x"
        return str(await tools.arun(call))


def test_coroutine_functions_start_early_too() -> None:
    events: list[AuditEvent] = []
    speculator = ToolSpeculator(on_event=events.append)
    assert [asyncio.run(run(n, speculator)) for n in range(100, 110)] == [f"read #W{n}" for n in range(100, 110)]
    assert "hit" in {event.outcome for event in events}


def test_a_cancelled_tool_writes_until_its_thread_ends() -> None:
    begun, release = threading.Event(), threading.Event()

    @tool
    def sell(order: str) -> None:
        begun.set()
        assert release.wait(60)

    speculator = ToolSpeculator()
    epoch = speculator.epochs.of("default", "s")

    async def main() -> None:
        with agent_tools([sell], session="s", speculator=speculator) as tools:
            waiting = asyncio.create_task(tools.arun(ToolCall("sell", {"order": "x"})))
            assert await asyncio.to_thread(begun.wait, 60)
            number = epoch.number
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not epoch.quiet and epoch.number > number
            number = epoch.number
            release.set()
            while epoch.number == number:
                await asyncio.sleep(0.001)

    asyncio.run(main())
    assert not epoch.quiet


def test_a_dropped_function_counts_as_running_until_its_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    release, ended = threading.Event(), threading.Event()

    @tool(read_only=True)
    def wait() -> None:
        assert release.wait(60)

    prediction = CallPrediction(ToolCall("wait", {}), 0.9, 0.9, 0)
    monkeypatch.setattr(CallModel, "predict", lambda *_: CallForecast((prediction,), ()))
    monkeypatch.setattr("agentspec.tools.learned.worthwhile", lambda found, *_: list(found))
    events: list[AuditEvent] = []
    speculator = ToolSpeculator(limits=LaunchLimits(at_once=1), on_event=events.append)
    monkeypatch.setattr(speculator.budget, "give_back", lambda give=speculator.budget.give_back: (give(), ended.set()))

    async def main() -> None:
        for _ in range(2):
            with agent_tools([wait], session="s", speculator=speculator) as tools:
                await tools.abefore_model([])
        assert [event.outcome for event in events] == ["launch", "waste"]
        release.set()
        assert await asyncio.to_thread(ended.wait, 60)
        with agent_tools([wait], session="s", speculator=speculator) as tools:
            await tools.abefore_model([])
            assert [event.outcome for event in events] == ["launch", "waste", "launch"]

    asyncio.run(main())


def test_a_conversation_that_was_cut_begins_anew() -> None:
    with agent_tools([look], session="s") as tools:
        tools.before_model([{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}])
        tools.before_model([{"role": "system", "content": "short"}])
        assert tools.definitions == [look.definition]


def test_what_cannot_be_used_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def other(order: str) -> None: ...

    other.__name__ = "look"
    unmarked: Any = other
    with pytest.raises(ConfigurationError, match="two tools"), agent_tools([look, tool(other)], session="s"):
        pass
    with (
        pytest.raises(ConfigurationError, match="mark 'look' with"),
        agent_tools([unmarked], session="s"),
    ):
        pass
    with pytest.raises(TypeError, match="named arguments"):
        PythonTool(lambda *args: None, read_only=False, max_age=None)
    with agent_tools([look], session="s") as tools:
        with pytest.raises(KeyError, match="no tool 'none'"):
            tools.run(ToolCall("none", {}))
        for arguments in ("[1", '{"order":' + "[" * 100_000):
            bad = {
                "role": "assistant",
                "tool_calls": [{"id": "c", "function": {"name": "look", "arguments": arguments}}],
            }
            with pytest.raises(InvalidRequestError, match=r"look .*: '[\[{].*needs more max_tokens"):
                tools.after_model(bad)
            tools.before_model([bad])
    assert "following a session" not in caplog.text


def test_a_tool_starts_once_a_streamed_chunk_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    call = ToolCall("look", {"order": "#W1"})
    monkeypatch.setattr(CallModel, "predict", lambda *_: CallForecast((), ()))
    monkeypatch.setattr(CallModel, "predict_named", lambda *_: [CallPrediction(call, 0.9, 0.9, NAMED)])
    monkeypatch.setattr("agentspec.tools.learned.worthwhile", lambda found, *_: list(found))
    events: list[AuditEvent] = []
    speculator = ToolSpeculator(on_event=events.append)
    with agent_tools([look, buy], session="s", speculator=speculator) as tools:
        tools.before_model([{"role": "user", "content": "look"}])
        for delta in ({"role": "assistant"}, *({"tool_calls": [one]} for one in _streamed("look", '{"order": "#W1"}'))):
            tools.hears({"choices": [{"index": 0, "delta": delta}]})
        tools.hears({"choices": [], "usage": None})
        assert [event.outcome for event in events] == ["launch"] and events[0].named
        tools.after_model(message(call))
        assert tools.run(call) == {"order": "#W1", "full": False, "bought": 0} and ran == ["look"]
    assert [event.outcome for event in events] == ["launch", "hit"]


def _streamed(name: str, arguments: str) -> list[dict[str, Any]]:
    head = {"index": 0, "id": "c0", "type": "function", "function": {"name": name, "arguments": ""}}
    return [head, {"index": 0, "function": {"arguments": arguments}}]


def test_what_runs_only_when_its_result_is_read_is_no_tool() -> None:
    def lines(order: str) -> Any:
        yield order

    async def parts(order: str) -> Any:
        yield order

    for function in (lines, parts):
        with pytest.raises(TypeError, match="is a generator"):
            agentspec.tool(function)


def test_a_function_around_a_coroutine_function_has_written_before_another_read_starts() -> None:
    quiet: list[bool] = []

    async def later(order: str) -> str:
        quiet.append(epoch.quiet)
        return order

    @agentspec.tool
    def sell(order: str) -> Any:
        return later(order)

    epoch = ToolSpeculator().epochs.of("default", "around")
    with agentspec.agent_tools([sell], session="around") as tools:
        assert asyncio.run(tools.arun(ToolCall("sell", {"order": "A"}))) == "A"
    assert quiet == [False]


def test_a_coroutine_function_is_run_by_arun() -> None:
    @agentspec.tool
    async def sell(order: str) -> str:
        return order

    with agentspec.agent_tools([sell], session="awaited") as tools:
        with pytest.raises(InvalidRequestError, match="arun"):
            tools.run(ToolCall("sell", {"order": "A"}))
        assert asyncio.run(tools.arun(ToolCall("sell", {"order": "A"}))) == "A"


class Leg(BaseModel):
    """A part of a trip."""

    city: str
    day: datetime.date


class Trip(BaseModel):
    """What `book` is called with."""

    legs: list[Leg]


@tool
def book(trip: Trip, *, seats: int = 1) -> str:
    """Book a trip."""
    return f"{trip.legs[0].city} {trip.legs[0].day.year} {seats}"


@tool
async def book_later(trip: Trip) -> str:
    """Book a trip later."""
    await asyncio.sleep(0)
    return trip.legs[0].city


TRIP: dict[str, Any] = {"trip": {"legs": [{"city": "Rome", "day": "2026-05-01"}]}}


def test_the_schema_of_nested_types_holds_what_it_refers_to() -> None:
    schema = book.definition["function"]["parameters"]
    assert schema["properties"]["trip"] == {"$ref": "#/$defs/Trip"}
    assert set(schema["$defs"]) == {"Trip", "Leg"}
    assert "$defs" not in look.schema


def test_arguments_are_made_what_the_annotations_say() -> None:
    with agent_tools([book, book_later], session="s", speculator=ToolSpeculator()) as tools:
        assert tools.run(ToolCall("book", {**TRIP, "seats": 2})) == "Rome 2026 2"
        assert asyncio.run(tools.arun(ToolCall("book_later", TRIP))) == "Rome"
        unfit: list[dict[str, Any]] = [{"trip": {}}, {**TRIP, "day": 1}, {}]
        for wrong in unfit:
            with pytest.raises(InvalidRequestError, match="called book with arguments that do not fit"):
                tools.run(ToolCall("book", wrong))


def test_a_step_that_stores_nothing_teaches_nothing() -> None:
    speculator = ToolSpeculator()
    taught: list[str] = []
    speculator.learned.add = lambda *_: taught.append("turn")  # type: ignore[method-assign]

    def turn() -> None:
        with agent_tools([look], session="s", speculator=speculator) as tools:
            tools.before_model([{"role": "user", "content": "W1"}])
            tools.after_model(message(ToolCall("look", {"order": "W1"})))

    turn()
    assert taught == ["turn"]
    step("secret", store=False)(turn)()
    assert taught == ["turn"]


def test_an_answer_that_cannot_be_read_ends_its_turn() -> None:
    with agent_tools([look], session="s", speculator=ToolSpeculator()) as tools:
        tools.before_model([{"role": "user", "content": "W1"}])
        cut = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "look", "arguments": '{"or'}}]}
        with pytest.raises(InvalidRequestError, match="needs more max_tokens"):
            tools.after_model(cut)
        assert tools._session._turn is None


def test_what_would_mean_nothing_is_refused_where_it_is_written() -> None:
    with pytest.raises(ConfigurationError, match="set read_only=True besides"):
        tool(max_age=5)
    with pytest.raises(ConfigurationError, match="seconds above 0"):
        tool(read_only=True, max_age=-1)
    for wrong in ("look", partial(lambda order: order)):
        with pytest.raises(TypeError, match=r"a tool is a function with a name, .* above its def"):
            tool(wrong)  # type: ignore[arg-type]
