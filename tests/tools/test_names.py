"""Tools that start once the model has written their name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest

from agentspec.cache import SuffixCache
from agentspec.tools import AgentCaller, AuditEvent, LaunchLimits, ToolCall, ToolPolicy, ToolSession, ToolSpeculator
from agentspec.tools.policy import ToolSpec
from agentspec.tools.prediction.model import CallForecast, CallModel, CallPrediction
from agentspec.tools.prediction.observation import NAMED, calling

READ, PEEK, WRITE = ToolSpec("read"), ToolSpec("peek"), ToolSpec("write")
CALL, OTHER, WRITING = ToolCall("read", {"id": "A1"}), ToolCall("peek", {"id": "A1"}), ToolCall("write", {"id": "A1"})


@pytest.fixture(autouse=True)
def foreseen(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Before a turn nothing is expected, after a name the one call of its tool; `foreseen` changes the former."""

    def foresee(*calls: ToolCall) -> None:
        predictions = tuple(CallPrediction(call, 0.9, 0.9, 0) for call in calls)
        monkeypatch.setattr(CallModel, "predict", lambda *_: CallForecast(predictions, ()))

    def named(*told: Any) -> list[CallPrediction]:
        return [CallPrediction(ToolCall(told[-1], {"id": "A1"}), 0.9, 0.9, NAMED)]

    foresee()
    monkeypatch.setattr(CallModel, "predict_named", named)
    monkeypatch.setattr("agentspec.tools.learned.worthwhile", lambda found, *_: list(found))
    return foresee


class World:
    """Runs tools, and keeps which ran."""

    def __init__(self) -> None:
        self.ran: list[ToolCall] = []

    def run(self, call: ToolCall) -> str:
        self.ran.append(call)
        return f"{call.name} {call.arguments['id']}"

    async def arun(self, call: ToolCall) -> str:
        await asyncio.sleep(0)
        return self.run(call)


def never(call: ToolCall) -> Any:
    raise AssertionError(f"{call} ran again")


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def events() -> list[AuditEvent]:
    return []


@pytest.fixture
def session(events: list[AuditEvent]) -> Iterator[ToolSession]:
    limits = LaunchLimits(per_turn=2)
    speculator = ToolSpeculator(ToolPolicy(["read", "peek"]), limits=limits, on_event=events.append)
    session = speculator.session(AgentCaller(session="s"))
    session.offers([READ, PEEK, WRITE])
    yield session
    speculator.close()


def outcomes(events: list[AuditEvent]) -> list[tuple[str, str]]:
    return [(event.outcome, event.tool) for event in events]


def test_a_named_tool_starts_before_its_call_is_complete(
    session: ToolSession, world: World, events: list[AuditEvent]
) -> None:
    assert session.begin_turn(world.run) == []
    session.names("read")
    session.end_turn([CALL])
    assert session.run(CALL, never) == "read A1"
    assert outcomes(events) == [("launch", "read"), ("hit", "read")] and world.ran == [CALL]


def test_a_named_tool_with_other_arguments_runs_as_called(
    session: ToolSession, world: World, events: list[AuditEvent]
) -> None:
    session.begin_turn(world.run)
    session.names("read")
    other = ToolCall("read", {"id": "A2"})
    session.end_turn([other])
    assert session.run(other, world.run) == "read A2"
    session.close()
    assert outcomes(events) == [("launch", "read"), ("waste", "read")]


def test_a_name_starts_once_and_only_within_its_turn(
    session: ToolSession, world: World, events: list[AuditEvent], foreseen: Callable[..., None]
) -> None:
    session.names("read")  # before any turn
    session.begin_turn(world.run)
    session.names("read")
    session.names("read")
    session.end_turn([CALL])
    session.names("peek")  # too late
    foreseen(OTHER)
    session.begin_turn(world.run)
    session.names("peek")  # it runs already
    session.abandon_turn()
    session.names("peek")
    assert [event for event in outcomes(events) if event[0] == "launch"] == [("launch", "read"), ("launch", "peek")]


def test_starts_of_a_turn_are_counted_together(
    session: ToolSession, world: World, events: list[AuditEvent], foreseen: Callable[..., None]
) -> None:
    foreseen(ToolCall("read", {"id": "A7"}), ToolCall("read", {"id": "A8"}))
    assert len(session.begin_turn(world.run)) == 2
    session.names("peek")
    assert [event.outcome for event in events] == ["launch", "launch"]


@pytest.mark.parametrize("name", ["write", "mystery", ""])
def test_a_tool_that_may_not_run_early_never_starts_by_its_name(
    session: ToolSession, world: World, events: list[AuditEvent], name: str
) -> None:
    session.begin_turn(world.run)
    session.names(name)
    session.end_turn([])
    assert world.ran == [] and events == []


@pytest.mark.parametrize("spec", [ToolSpec("read", needs_approval=True), ToolSpec("read", injected=True)])
def test_a_listed_tool_that_cannot_start_early_does_not_by_its_name(
    session: ToolSession, world: World, spec: ToolSpec
) -> None:
    session.offers([spec])
    session.begin_turn(world.run)
    session.names("read")
    assert world.ran == []


def test_the_name_of_a_writing_tool_drops_what_runs_and_starts_nothing_more(
    session: ToolSession, world: World, events: list[AuditEvent], foreseen: Callable[..., None]
) -> None:
    foreseen(CALL)
    session.begin_turn(world.run)
    session.names("write")
    assert outcomes(events) == [("launch", "read"), ("stale", "read")]
    session.names("peek")
    session.names("read")
    session.end_turn([WRITING, CALL])
    assert session.run(WRITING, world.run) == "write A1" and session.run(CALL, world.run) == "read A1"
    assert len(events) == 2 and sorted(call.name for call in world.ran) == ["read", "read", "write"]


def test_a_writing_tool_after_a_named_one_voids_its_result(
    session: ToolSession, world: World, events: list[AuditEvent]
) -> None:
    session.begin_turn(world.run)
    session.names("read")
    session.end_turn([CALL, WRITING])
    session.run(WRITING, world.run)
    session.run(CALL, world.run)
    assert outcomes(events) == [("launch", "read"), ("stale", "read")]
    assert sorted(call.name for call in world.ran) == ["read", "read", "write"]


def test_named_tools_in_an_event_loop(session: ToolSession, world: World, events: list[AuditEvent]) -> None:
    async def main() -> str:
        await session.abegin_turn(world.arun)
        session.names("read")
        session.end_turn([CALL])
        return str(await session.arun(CALL, never))

    assert asyncio.run(main()) == "read A1" and world.ran == [CALL]
    assert outcomes(events) == [("launch", "read"), ("hit", "read")]


def test_a_writing_name_cancels_the_tasks_that_run(
    session: ToolSession, events: list[AuditEvent], foreseen: Callable[..., None]
) -> None:
    cancelled = threading.Event()

    async def endless(call: ToolCall) -> str:
        try:
            return str(await asyncio.sleep(3600))
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def main() -> None:
        foreseen(CALL)
        await session.abegin_turn(endless)
        await asyncio.sleep(0)
        session.names("write")
        while not cancelled.is_set():
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), 30))
    assert outcomes(events) == [("launch", "read"), ("stale", "read")]


def test_a_name_that_another_thread_hears_starts_a_task_of_the_loop(session: ToolSession, world: World) -> None:
    async def main() -> None:
        await session.abegin_turn(world.arun)
        await asyncio.to_thread(session.names, "read")
        while not world.ran:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), 30))
    assert world.ran == [CALL]


def test_a_name_that_comes_after_its_turn_starts_nothing(session: ToolSession, world: World) -> None:
    async def main() -> None:
        await session.abegin_turn(world.arun)
        thread = threading.Thread(target=session.names, args=("read",))
        thread.start()
        thread.join()  # the loop hears of it only below
        session.end_turn([])
        await session.abegin_turn(world.arun)
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert world.ran == []


def test_a_named_tool_runs_in_the_context_of_the_turns_beginning(session: ToolSession) -> None:
    label, seen, done = ContextVar("label", default="outside"), list[str](), threading.Event()

    def run(call: ToolCall) -> str:
        seen.append(label.get())
        done.set()
        return ""

    label.set("tools")
    session.begin_turn(run)
    label.set("model")
    session.names("read")
    assert done.wait(30) and seen == ["tools"]


def test_a_failing_predictor_is_not_noticed(
    session: ToolSession, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(CallModel, "predict_named", fails)
    session.begin_turn(world.run)
    session.names("read")
    session.end_turn([CALL])
    assert session.run(CALL, world.run) == "read A1" and world.ran == [CALL]


def test_what_names_teach_is_kept(monkeypatch: pytest.MonkeyPatch, world: World, tmp_path: Any) -> None:
    monkeypatch.undo()
    with SuffixCache.open(tmp_path) as cache:
        first = ToolSpeculator(ToolPolicy(["read"]), cache=cache)
        session = first.session(AgentCaller(session="s"))
        session.offers([READ])
        for number in range(30):
            session.says(f"look at #A{number:04}")
            session.begin_turn(world.run)
            session.names("read")
            session.end_turn([ToolCall("read", {"id": f"#A{number:04}"})])
        first.close()
        second = ToolSpeculator(ToolPolicy(["read"]), cache=cache)
        caller = AgentCaller(session="t")
        second.learned.refresh(caller)
        model = second.learned._agent(caller).model
        assert calling("read") in model.seconds and set(model.seconds) > {calling("read")}
        assert {kind for kind, _ in model._calibration._bins} >= {NAMED}
        second.close()
