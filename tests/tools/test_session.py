"""Early starts change no transcript: random agents with tools that read, write, fail and are unknown."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.tools import AgentCaller, ToolCall, ToolEvent, ToolPolicy, ToolSession, ToolSpec, ToolSpeculator
from agentspec.tools.model import AT_ONCE, PER_TURN, CallModel
from tests.conftest import costly

pytestmark = pytest.mark.usefixtures("likely_starts_pay")
READ, LIST, WRITE, MYSTERY, FRAGILE = (
    ToolSpec("read"),
    ToolSpec("list"),
    ToolSpec("write"),
    ToolSpec("mystery"),
    ToolSpec("fragile"),
)
READ_ONLY = ("read", "list", "fragile")


@dataclass
class World:
    """A shop with orders. It counts how often each tool ran."""

    values: dict[str, int] = field(default_factory=lambda: {f"A{n}": n for n in range(4)})
    ran: list[str] = field(default_factory=list)

    def run(self, call: ToolCall) -> str:
        self.ran.append(call.name)
        return json.dumps(getattr(self, f"_{call.name}")(**call.arguments))

    def _read(self, id: str, detail: bool = False) -> Any:
        return {"id": id, "value": self.values.get(id), "more": detail}

    def _list(self) -> Any:
        return {"ids": sorted(self.values)}

    def _write(self, id: str) -> Any:
        self.values[id] = self.values.get(id, 0) + 10
        return "done"

    def _mystery(self) -> Any:
        self.values[f"A{len(self.values)}"] = sum(self.values.values())
        return len(self.values)

    def _fragile(self, id: str) -> Any:
        if self.values.get(id, 0) % 2:
            raise ValueError(f"{id} is odd")
        return self.values.get(id)


def decide(dice: random.Random, transcript: Sequence[str]) -> list[ToolCall]:
    """The calls of a turn: mostly reads that go on from the last ones, so that they can be predicted."""
    number = len(transcript) % 4
    roll = dice.random()
    if roll < 0.12:
        return [ToolCall("write", {"id": f"A{number}"})]
    if roll < 0.2:
        return [ToolCall("mystery", {})]
    if roll < 0.3:
        return [ToolCall("fragile", {"id": f"A{number}"})]
    if roll < 0.4:
        return [ToolCall("list", {})]
    if roll < 0.5:
        return [ToolCall("write", {"id": "A1"}), ToolCall("read", {"id": "A1"})]
    if roll < 0.6:
        return []
    return [ToolCall("read", {"id": f"A{number}"})]


def outcome(run: Any) -> str:
    """What a tool returned or raised."""
    try:
        return str(run())
    except ValueError as error:
        return f"error: {error}"


def play(session: ToolSession | None, world: World, seed: int, turns: int = 12) -> list[str]:
    """The transcript of a session, with or without early starts."""
    dice, transcript = random.Random(seed), ["look at order A0, please"]
    if session is not None:
        session.offers([READ, LIST, WRITE, FRAGILE])  # `mystery` is unknown to it
        session.says(transcript[0])
    for _ in range(turns):
        if session is not None:
            session.begin_turn(world.run)
        calls = decide(dice, transcript)
        if session is not None:
            session.end_turn(calls)
        transcript.append(json.dumps([[call.name, call.arguments] for call in calls]))
        for call in calls:
            result = outcome(lambda call=call: session.run(call, world.run) if session else world.run(call))
            transcript.append(result)
            if session is not None:
                session.returns(call.name, result)
    return transcript


def taught(*calls: ToolCall, tools: Sequence[ToolSpec] = (), **options: Any) -> tuple[ToolSpeculator, list[ToolEvent]]:
    """A speculator that expects these calls in every turn, and its events from now on."""
    events: list[ToolEvent] = []
    policy = ToolPolicy({*READ_ONLY, "sort"}, **options)
    speculator = ToolSpeculator(policy, on_event=events.append)
    for number in range(4 if calls else 0):
        session = speculator.session(AgentCaller(session=f"taught {number}"))
        session.offers(tools or (READ, LIST, WRITE, FRAGILE))
        session.says("go")
        session.begin_turn(lambda _: "{}")
        session.end_turn(calls)
        for call in calls:
            session.run(call, lambda _: "{}")
        session.close()
    events.clear()
    return speculator, events


def opened(*calls: ToolCall, tools: Sequence[ToolSpec] = (), **options: Any) -> tuple[ToolSession, list[ToolEvent]]:
    """A new session of `taught`."""
    speculator, events = taught(*calls, tools=tools, **options)
    session = speculator.session(AgentCaller(session="new"))
    session.offers(tools or (READ, LIST, WRITE, FRAGILE))
    session.says("go")
    return session, events


def outcomes(events: list[ToolEvent]) -> list[str]:
    return [event.outcome for event in events]


@costly
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_transcripts_are_equal_with_and_without_early_starts(seed: int, sessions: int) -> None:
    """Sessions of one agent in one world: what earlier ones taught starts tools in the later ones."""
    events: list[ToolEvent] = []

    def listener(event: ToolEvent) -> None:
        events.append(event)
        raise ArithmeticError("a listener that fails harms nothing")

    speculator = ToolSpeculator(ToolPolicy(READ_ONLY), on_event=listener)
    with_, without = World(), World()
    for number in range(sessions + 2):
        session = speculator.session(AgentCaller(session=str(number)))
        assert play(session, with_, seed + number) == play(None, without, seed + number)
        session.close()
    assert with_.values == without.values
    for tool in ("write", "mystery"):  # and a tool that may change something never ran more often
        assert with_.ran.count(tool) == without.ran.count(tool)
    assert not {event.tool for event in events} - set(READ_ONLY)


def test_random_agents_do_use_early_starts() -> None:
    """Otherwise the property above would say little."""
    events: list[ToolEvent] = []
    speculator = ToolSpeculator(ToolPolicy(READ_ONLY), on_event=events.append)
    for number in range(20):
        play(speculator.session(AgentCaller(session=str(number))), World(), number)
    speculator.close()
    found = outcomes(events)
    assert found.count("hit") > 10 and found.count("waste") > 10 and "stale" in found and "failed" in found


CALL = ToolCall("read", {"id": "A1"})


def test_a_result_is_used_once() -> None:
    session, events = opened(CALL)
    world = World()
    assert session.begin_turn(world.run) == [CALL]
    session.end_turn([CALL, CALL])
    assert session.run(CALL, pytest.fail) == session.run(CALL, world.run)
    assert outcomes(events) == ["start", "hit"]


def test_a_result_is_used_in_a_later_turn() -> None:
    session, events = opened(CALL)
    world = World()
    session.begin_turn(world.run)
    session.end_turn([ToolCall("list", {})])
    session.run(ToolCall("list", {}), world.run)
    assert session.begin_turn(pytest.fail) == []  # it is there
    session.end_turn([])
    session.says("and now?")
    session.begin_turn(pytest.fail)
    session.end_turn([CALL])
    assert session.run(CALL, pytest.fail) == world.run(CALL) and outcomes(events) == ["start", "hit"]


def test_results_of_a_tool_that_was_replaced_are_dropped() -> None:
    session, events = opened(CALL)
    for function in (World().run, World().run):
        session.offers([READ], {"read": function})
        assert session.begin_turn(function) == [CALL]
        session.end_turn([])
    session.offers([READ], {"read": function})
    assert session.begin_turn(pytest.fail) == []
    assert outcomes(events) == ["start", "stale", "start"]


def test_a_write_by_another_agent_of_the_session_voids_results() -> None:
    reader, _ = opened(CALL)
    writer = ToolSpeculator(ToolPolicy(READ_ONLY)).session(reader.caller)
    writer.offers([WRITE])
    world = World()
    assert reader.begin_turn(world.run) == [CALL]
    reader.end_turn([])
    writer.run(ToolCall("write", {"id": "A1"}), world.run)
    assert '"value": 11' in reader.run(CALL, world.run)


@pytest.mark.parametrize("other", [{"tenant": "b"}, {"identity": "key 2"}, {"session": "s"}])
def test_no_other_caller_gets_a_result(other: dict[str, str]) -> None:
    speculator, events = taught(CALL)
    first, second = (speculator.session(AgentCaller(**{"session": "new", **who})) for who in ({}, other))
    for session in (first, second):
        session.offers([READ])
    assert first.begin_turn(World().run) == [CALL]
    assert second.run(CALL, lambda _: "own") == "own" and outcomes(events) == ["start"]


def test_nothing_starts_while_a_writing_tool_runs() -> None:
    session, _ = opened(CALL)
    world = World()
    assert session.run(ToolCall("write", {"id": "A1"}), lambda _: session.begin_turn(world.run)) == []
    assert session.begin_turn(world.run) == [CALL]


def test_results_older_than_max_age_are_not_used() -> None:
    speculator, events = taught(CALL, max_age=1e-9)
    session, world = speculator.session(AgentCaller(session="new")), World()
    session.offers([READ])
    session.begin_turn(world.run)
    session.run(CALL, world.run)
    assert outcomes(events) == ["start", "stale"] and world.ran == ["read", "read"]
    session.begin_turn(world.run)
    speculator.session(AgentCaller(session="another"))
    assert outcomes(events) == ["start", "stale", "start", "waste"]


class Endless:
    """A tool that ends only by being cancelled, which it counts."""

    def __init__(self) -> None:
        self.cancelled = 0

    async def __call__(self, call: ToolCall) -> str:
        try:
            return str(await asyncio.get_running_loop().create_future())
        finally:
            self.cancelled += 1


async def cancelled(session: ToolSession, call: ToolCall, tool: Endless) -> None:
    """Wait for a call, and stop waiting."""
    waiting = asyncio.create_task(session.arun(call, tool))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_early_starts_in_an_event_loop() -> None:
    session, events = opened(CALL)
    world, endless = World(), Endless()

    async def invoke(call: ToolCall) -> str:
        await asyncio.sleep(0)
        return world.run(call)

    async def main() -> str:
        await session.abegin_turn(endless)
        await asyncio.sleep(0)
        session.abandon_turn()
        await session.abegin_turn(invoke)
        session.end_turn([CALL])
        return str(await session.arun(CALL, endless))

    assert asyncio.run(main()) == world.run(CALL)
    assert outcomes(events) == ["start", "waste", "start", "hit"] and endless.cancelled == 1


def test_a_waiter_that_is_cancelled_cancels_the_tool() -> None:
    session, events = opened(CALL)
    endless = Endless()

    async def main() -> None:
        await session.abegin_turn(endless)
        session.end_turn([CALL])
        await cancelled(session, CALL, endless)

    asyncio.run(main())
    assert endless.cancelled == 1 and outcomes(events) == ["start", "waste"]


def test_nothing_starts_after_a_writing_call_was_cancelled() -> None:
    session, events = opened(CALL)
    world = World()
    asyncio.run(cancelled(session, ToolCall("list", {}), Endless()))
    assert session.begin_turn(world.run) == [CALL]
    asyncio.run(cancelled(session, ToolCall("write", {"id": "A1"}), Endless()))
    assert session.begin_turn(world.run) == [] and outcomes(events) == ["start", "stale"]


def begun(session: ToolSession, invoke: Any) -> list[ToolCall]:
    """What a turn starts whose model then fails."""
    started = session.begin_turn(invoke)
    session.abandon_turn()
    return started


def test_starts_are_bounded() -> None:
    session, _ = opened(*(ToolCall("read", {"id": f"A{n}"}) for n in range(8)))
    release = threading.Event()
    assert len(begun(session, lambda _: release.wait(60))) == PER_TURN
    assert len(begun(session, lambda _: release.wait(60))) == AT_ONCE - PER_TURN
    assert begun(session, pytest.fail) == []  # those dropped are running still
    release.set()


def test_a_session_holds_the_newest_64_results() -> None:
    orders = [ToolCall("read", {"id": f"A{n}"}) for n in range(200, 210)]
    speculator, events = taught(max_age=1e6)
    for number, order in enumerate(orders):  # the user names the order that is read
        session = speculator.session(AgentCaller(session=f"taught {number}"))
        session.offers([READ])
        session.says(f"look at {order.arguments['id']}")
        session.begin_turn(lambda _: "{}")
        session.end_turn([order])
        session.run(order, lambda _: "{}")
    events.clear()
    session = speculator.session(AgentCaller(session="new"))
    session.offers([READ])
    for number in range(300, 1000):
        session.says(f"look at A{number}")
        session.begin_turn(lambda _: "{}")
        session.end_turn([], store=False)
        if outcomes(events).count("start") > 70:
            break
    assert outcomes(events).count("start") - outcomes(events).count("waste") == 64


@pytest.mark.parametrize("broken", ["predict", "learn"])
def test_a_failing_predictor_is_logged_once_and_the_agent_goes_on(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class BrokenError(ArithmeticError):
        """Another kind for each test: one of a kind is logged once."""

    def fails(*_: Any) -> Any:
        raise BrokenError

    session, _ = opened(CALL)
    monkeypatch.setattr(CallModel, broken, fails)  # none of its inputs makes it fail
    for _ in range(3):
        session.begin_turn(World().run)
        session.end_turn([CALL, ToolCall("write", {"id": "A1"})])
    assert len([record for record in caplog.records if "the agent goes on" in record.message]) == 1


def test_a_tool_that_changes_its_arguments_changes_no_other_call() -> None:
    shared = {"orders": ["b", "a"]}
    first, other = ToolCall("sort", {"of": shared}), ToolCall("sort", {"of": shared, "twice": True})
    session, _ = opened(first, other, tools=[ToolSpec("sort")])

    def sort(call: ToolCall) -> str:
        call.arguments["of"]["orders"].append("c")
        return json.dumps(call.arguments["of"]["orders"])

    assert len(session.begin_turn(sort)) == 2
    session.end_turn([first, other])
    assert session.run(first, pytest.fail) == session.run(other, pytest.fail) == '["b", "a", "c"]'
    assert shared == {"orders": ["b", "a"]}


@pytest.mark.parametrize(
    "arguments", [{"id": ("A1",)}, {"id": {1: "A1"}}, {"id": {"A1"}}, {"id": float("nan"), "more": object()}]
)
def test_calls_with_arguments_that_are_no_json_use_no_early_result(arguments: dict[str, Any]) -> None:
    call = ToolCall("read", arguments)
    session, events = opened(call, ToolCall("read", {"id": ["A1"]}))
    session.begin_turn(lambda _: "another")
    session.end_turn([call])
    assert session.run(call, lambda _: "ran") == "ran" and "hit" not in outcomes(events)


def test_a_misspelt_name_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    policy = ToolPolicy(["get_wether", "elsewhere", "get_orders", "get_order"])  # others may belong to another agent
    session = ToolSession(ToolSpeculator(policy), AgentCaller(session="s"))
    for _ in range(2):
        session.offers([ToolSpec("get_weather"), ToolSpec("buy"), ToolSpec("get_orders")])
        session.offers([ToolSpec("buy")])
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "no tool get_wether is offered" in said and said.endswith("did you mean get_weather?")
