"""Early starts change no transcript: random agents with tools that read, write, fail and are unknown."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.tools import (
    AgentCaller,
    ToolCall,
    ToolEvent,
    ToolPolicy,
    ToolSession,
    ToolSpec,
    ToolSpeculator,
)
from agentspec.tools.model import AT_ONCE, PER_TURN, CallForecast, CallModel, CallPrediction
from tests.conftest import costly

SCHEMA = {"type": "object", "properties": {"id": {"type": "string"}, "detail": {"type": "boolean", "default": False}}}
READ, LIST, WRITE, MYSTERY, FRAGILE = (
    ToolSpec("read", SCHEMA),
    ToolSpec("list"),
    ToolSpec("write"),
    ToolSpec("mystery"),
    ToolSpec("fragile", SCHEMA),
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


@pytest.fixture(autouse=True)
def everything_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools of these tests take no time, so that no early start would pay."""
    monkeypatch.setattr("agentspec.tools.model.pays", lambda *_: True)


@pytest.fixture
def expect(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let every turn be expected to make exactly these calls, all of which have been timed."""

    def expect(*calls: ToolCall) -> None:
        predictions = tuple(CallPrediction(call, 0.9, 0.9, 0) for call in calls)
        monkeypatch.setattr(CallModel, "predict", lambda *_: CallForecast(predictions, ()))
        monkeypatch.setattr("agentspec.tools.speculator.worthwhile", lambda found, *_: list(found))

    return expect


def opened(*tools: ToolSpec, policy: ToolPolicy | None = None, **caller: Any) -> tuple[ToolSession, list[ToolEvent]]:
    events: list[ToolEvent] = []
    given = policy or ToolPolicy(READ_ONLY)
    session = ToolSpeculator(given, on_event=events.append).session(AgentCaller(**caller))
    session.offers(tools or (READ, LIST, WRITE, FRAGILE))
    return session, events


def outcomes(events: list[ToolEvent]) -> list[str]:
    return [event.outcome for event in events]


@costly
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_transcripts_are_equal_with_and_without_early_starts(seed: int, sessions: int) -> None:
    """Sessions of one agent in one world: what earlier ones taught starts tools in the later ones."""
    events: list[ToolEvent] = []
    speculator = ToolSpeculator(ToolPolicy(READ_ONLY), on_event=events.append)
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


def test_a_result_is_used_for_the_identical_call_only(expect: Any) -> None:
    expect(CALL)
    session, events = opened()
    world = World()
    assert session.begin_turn(world.run) == [CALL]
    session.end_turn([CALL])
    assert session.run(CALL, pytest.fail) == world.run(CALL)
    session.begin_turn(world.run)
    session.end_turn([ToolCall("read", {"id": "A1", "detail": True})])
    assert '"more": true' in session.run(ToolCall("read", {"id": "A1", "detail": True}), world.run)
    session.close()
    assert outcomes(events) == ["start", "hit", "start", "waste"]


def test_a_result_is_used_once(expect: Any) -> None:
    expect(CALL)
    session, events = opened()
    world = World()
    session.begin_turn(world.run)
    session.end_turn([CALL, CALL])
    assert session.run(CALL, world.run) == session.run(CALL, world.run)
    assert world.ran == ["read", "read"] and outcomes(events) == ["start", "hit"]


def test_a_result_waits_for_a_later_turn_and_for_the_users_next_words(expect: Any) -> None:
    expect(CALL)
    session, events = opened()
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


def test_what_another_function_of_the_name_started_is_dropped(expect: Any) -> None:
    expect(CALL)
    session, events = opened()
    for function in (World().run, World().run):
        session.offers([READ], {"read": function})
        assert session.begin_turn(function) == [CALL]
        session.end_turn([])
    session.offers([READ], {"read": function})
    assert session.begin_turn(pytest.fail) == []
    assert outcomes(events) == ["start", "stale", "start"]


@pytest.mark.parametrize("between", [ToolCall("write", {"id": "A1"}), ToolCall("mystery", {})])
def test_a_call_that_may_change_something_voids_what_was_read_before(expect: Any, between: ToolCall) -> None:
    expect(CALL)
    session, events = opened()
    world = World()
    session.begin_turn(world.run)
    session.end_turn([between, CALL])
    session.run(between, world.run)
    assert session.run(CALL, world.run) == world.run(CALL)
    assert outcomes(events) == ["start", "stale"]


def test_a_writing_agent_of_the_same_session_voids_with_a_speculator_of_its_own_too(expect: Any) -> None:
    expect(CALL)
    reader, writer = (ToolSpeculator(ToolPolicy(READ_ONLY)).session(AgentCaller(session="order 7")) for _ in range(2))
    for session in (reader, writer):
        session.offers([READ, WRITE])
    world = World()
    reader.begin_turn(world.run)
    reader.end_turn([])
    writer.run(ToolCall("write", {"id": "A1"}), world.run)
    assert '"value": 11' in reader.run(CALL, world.run)


def test_nothing_starts_while_a_writing_tool_runs(expect: Any) -> None:
    expect(CALL)
    session, _ = opened()
    world = World()
    assert session.run(ToolCall("write", {"id": "A1"}), lambda _: session.begin_turn(world.run)) == []
    assert session.begin_turn(world.run) == [CALL]


def test_a_result_waits_for_its_call_no_longer_than_allowed(expect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expect(CALL)
    session, events = opened(policy=ToolPolicy(READ_ONLY, max_age=5.0))
    world = World()
    session.begin_turn(world.run)
    session.end_turn([CALL])
    now = time.monotonic()
    monkeypatch.setattr("agentspec.tools.session.time.monotonic", lambda: now + 6.0)
    session.run(CALL, world.run)
    assert outcomes(events) == ["start", "stale"] and world.ran == ["read", "read"]


def test_a_failed_start_is_never_shown(expect: Any) -> None:
    expect(CALL)
    session, events = opened()

    def fails(call: ToolCall) -> str:
        raise ValueError("not yet")

    session.begin_turn(fails)
    session.end_turn([CALL])
    assert session.run(CALL, lambda _: "now") == "now"
    assert outcomes(events) == ["start", "failed"] and "not yet" not in str(events)


def test_early_starts_in_an_event_loop(expect: Any) -> None:
    expect(CALL)
    session, events = opened()
    world = World()
    cancelled: list[bool] = []

    async def invoke(call: ToolCall) -> str:
        await asyncio.sleep(0)
        return world.run(call)

    async def endless(call: ToolCall) -> str:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return ""

    async def main() -> str:
        await session.abegin_turn(endless)
        session.abandon_turn()
        await session.abegin_turn(invoke)
        session.end_turn([CALL])
        return str(await session.arun(CALL, endless))

    assert asyncio.run(main()) == world.run(CALL)
    assert outcomes(events) == ["start", "waste", "start", "hit"] and cancelled == [True]


def test_whoever_stops_waiting_stops_the_tool(expect: Any) -> None:
    expect(CALL)
    session, events = opened()
    cancelled = []

    async def endless(call: ToolCall) -> str:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(call)
            raise
        return ""

    async def main() -> None:
        await session.abegin_turn(endless)
        session.end_turn([CALL])
        waiting = asyncio.create_task(session.arun(CALL, endless))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert cancelled == [CALL] and outcomes(events) == ["start", "waste"]


REFUSED = {"not listed": ToolSpec("write"), "takes state": ToolSpec("read", injected=True)}


@pytest.mark.parametrize("spec", REFUSED.values(), ids=REFUSED)
def test_what_may_not_run_early_never_does(expect: Any, spec: ToolSpec) -> None:
    call = ToolCall(spec.name, {})
    expect(call)
    session, events = opened(spec, policy=ToolPolicy(["read"]))
    for _ in range(3):
        assert session.begin_turn(pytest.fail) == []
        session.end_turn([call])
        assert session.run(call, lambda _: "ran") == "ran"
    assert not events


def begun(session: ToolSession, invoke: Any) -> list[ToolCall]:
    """What a turn starts whose model then fails."""
    started = session.begin_turn(invoke)
    session.abandon_turn()
    return started


def test_starts_are_bounded(expect: Any) -> None:
    calls = [ToolCall("read", {"id": f"A{n}"}) for n in range(8)]
    expect(*calls)
    session, _ = opened()
    release = threading.Event()
    assert len(begun(session, lambda _: release.wait(60))) == PER_TURN
    assert len(begun(session, lambda _: release.wait(60))) == AT_ONCE - PER_TURN
    assert begun(session, pytest.fail) == []  # those dropped are running still
    release.set()


@pytest.mark.parametrize("result", ['{"a": NaN}', "[1e999]", '{"a": [-Infinity, 1]}', "9" * 4000])
def test_results_with_numbers_that_json_cannot_hold_harm_nothing(result: str) -> None:
    session, _ = opened()
    world = World()
    for _ in range(3):
        session.begin_turn(world.run)
        session.end_turn([CALL])
        session.returns("read", result)
    assert session.run(CALL, world.run) == world.run(CALL)


@pytest.mark.parametrize("broken", ["predict", "observe"])
def test_a_predictor_that_fails_is_not_noticed(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise ArithmeticError("broken")

    session, _ = opened()
    world = World()
    session.begin_turn(world.run)
    session.end_turn([CALL])
    monkeypatch.setattr(CallModel, broken, fails)
    monkeypatch.setattr("agentspec.tools.speculative_call._reported", set())
    for _ in range(3):
        session.begin_turn(world.run)
        session.end_turn([CALL, ToolCall("write", {"id": "A1"})])
    assert len([record for record in caplog.records if "the agent goes on" in record.message]) == 1


def test_nothing_starts_after_a_writing_call_was_cancelled(expect: Any) -> None:
    expect(CALL)
    session, events = opened()

    async def endless(call: ToolCall) -> str:
        await asyncio.sleep(3600)
        return ""

    async def main(call: ToolCall) -> None:
        waiting = asyncio.create_task(session.arun(call, endless))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    world = World()
    asyncio.run(main(ToolCall("list", {})))
    assert session.begin_turn(world.run) == [CALL]
    asyncio.run(main(ToolCall("write", {"id": "A1"})))
    assert session.begin_turn(world.run) == [] and outcomes(events) == ["start", "stale"]


def test_a_tool_that_changes_its_arguments_changes_no_other_call(expect: Any) -> None:
    spec = ToolSpec("sort")
    shared = {"orders": ["b", "a"]}
    first, other = ToolCall("sort", {"of": shared}), ToolCall("sort", {"of": shared, "twice": True})
    expect(first, other)
    session, _ = opened(spec, policy=ToolPolicy(["sort"]))

    def sort(call: ToolCall) -> str:
        call.arguments["of"]["orders"].append("c")
        return json.dumps(call.arguments["of"]["orders"])

    assert len(session.begin_turn(sort)) == 2
    session.end_turn([first, other])
    assert session.run(first, pytest.fail) == session.run(other, pytest.fail) == '["b", "a", "c"]'
    assert shared == {"orders": ["b", "a"]}


@pytest.mark.parametrize("arguments", [{"id": ("A1",)}, {"id": {1: "A1"}}, {"id": {"A1"}}])
def test_arguments_that_json_would_turn_into_others_start_nothing(expect: Any, arguments: dict[str, Any]) -> None:
    expect(ToolCall("read", arguments))
    session, events = opened()
    assert session.begin_turn(pytest.fail) == [] and not events


def test_a_misspelt_name_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    policy = ToolPolicy(["get_wether", "elsewhere"])  # the second may belong to another agent
    session = ToolSession(ToolSpeculator(policy), AgentCaller(session="s"))
    for _ in range(2):
        session.offers([ToolSpec("get_weather"), ToolSpec("buy")])
        session.offers([ToolSpec("buy")])
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "no tool get_wether is offered" in said and said.endswith("did you mean get_weather?")
    listed = ToolPolicy(["get_order", "get_orders"])
    ToolSession(ToolSpeculator(listed), AgentCaller(session="s")).offers([ToolSpec("get_orders")])
    assert len(caplog.records) == 1  # what is listed itself was not misspelt


def test_what_was_not_used_in_time_is_forgotten_when_another_session_begins(expect: Any) -> None:
    expect(CALL)
    events: list[ToolEvent] = []
    speculator = ToolSpeculator(ToolPolicy(READ_ONLY, max_age=1e-9), on_event=events.append)
    session = speculator.session(AgentCaller(session="first"))
    session.offers([READ])
    assert session.begin_turn(World().run) == [CALL]
    speculator.session(AgentCaller(session="second"))
    assert outcomes(events) == ["start", "waste"] and not session._started


def test_no_more_than_64_results_of_a_session_wait(expect: Any) -> None:
    session, events = opened()
    for number in range(80):
        expect(ToolCall("read", {"id": f"A{number}"}))
        assert session.begin_turn(World().run)
        session.end_turn([])
    assert outcomes(events).count("waste") == 16
    assert session.run(ToolCall("read", {"id": "A79"}), pytest.fail)
    session.close()


def test_a_call_waits_for_a_tool_that_is_still_running(expect: Any) -> None:
    expect(CALL)
    session, events = opened()
    release = threading.Event()

    def slow(call: ToolCall) -> str:
        assert release.wait(60)
        return "slow"

    session.begin_turn(slow)
    session.end_turn([CALL])
    threading.Timer(0.01, release.set).start()
    assert session.run(CALL, pytest.fail) == "slow" and outcomes(events) == ["start", "hit"]


def test_arguments_that_are_no_json_are_left_alone() -> None:
    session, _ = opened()
    session.begin_turn(pytest.fail)
    call = ToolCall("read", {"id": float("nan"), "more": object()})
    session.end_turn([call])
    assert session.run(call, lambda _: "ran") == "ran"


def test_a_listener_that_fails_harms_nothing(expect: Any) -> None:
    expect(CALL)

    def fails(event: ToolEvent) -> None:
        raise ArithmeticError("broken")

    session = ToolSpeculator(ToolPolicy(READ_ONLY), on_event=fails).session(AgentCaller())
    session.offers([READ])
    world = World()
    assert session.begin_turn(world.run) == [CALL]
    session.end_turn([CALL])
    assert session.run(CALL, pytest.fail) and world.ran == ["read"]
