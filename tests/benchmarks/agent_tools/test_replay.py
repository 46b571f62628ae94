"""The replay of recorded sessions predicts calls from the past alone, and computes what early starts would save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentspec.benchmarks.agent_tools.replay import AgentToolsReport, ReplayedTurn, run_agent_tools, session_times
from agentspec.tools.history import ToolCall
from agentspec.tools.model import CallForecast, CallPrediction


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def line(session: int, step: int, delta: list[tuple[str, str]], response: str) -> str:
    added = [{"role": role, "content": content} for role, content in delta]
    record = {"session": str(session), "step": step, "messages_delta": added, "response": response}
    return json.dumps({"source": "test", **record})


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Sessions in which the user tells an id; the agent reads the user, reads its order, and pays it."""
    lines = []
    for number in range(101, 113):
        order = f"#W{number}"
        lines += [
            line(number, 0, [("system", "help"), ("user", f"I am ann_{number}")], call("get_user", id=f"ann_{number}")),
            line(number, 1, [("tool", json.dumps({"orders": [order]}))], "Yes.\n" + call("get_order", order=order)),
            line(number, 2, [("tool", json.dumps({"total": number}))], call("pay", order=order)),
            line(number, 3, [("tool", "paid")], "done"),
        ]
    path = tmp_path / "sessions.jsonl"
    path.write_text("\n".join(lines))
    return path


def measured(path: Path, **options: Any) -> AgentToolsReport:
    return run_agent_tools([path], progress=lambda _: None, **options)


def test_calls_are_predicted_from_earlier_sessions(recorded: Path) -> None:
    replay = measured(recorded).files[0]
    assert len(replay.turns) == 48 and len(list(replay.reads())) == 24
    assert replay.turns[0].top == [] and 0.7 < replay.hit_rate(1) <= replay.hit_rate(3) < 1.0
    assert "pay" not in str(replay.turns[-2].top)


def test_the_first_session_is_not_predicted_by_later_ones(recorded: Path, tmp_path: Path) -> None:
    alone = tmp_path / "one.jsonl"
    alone.write_text("\n".join(recorded.read_text().splitlines()[:4]))
    first = measured(alone).files[0]
    whole = measured(recorded).files[0]
    assert [turn.forecast for turn in first.turns] == [turn.forecast for turn in whole.turns[:4]]


def test_hits_save_time_and_writing_tools_none(recorded: Path) -> None:
    replay = measured(recorded).files[0]
    times = replay.times()
    assert times.plain > times.drafting > times.early
    assert 1.0 < times.speedup < 2.0 and 0 < times.used <= times.starts
    nothing = measured(recorded, read_only=["none"]).files[0]
    times = nothing.times()
    assert (times.speedup, times.starts) == (1.0, 0)


READ, OTHER, WRITE = (ToolCall(name, {}) for name in ("read", "other", "write"))


def turn(*calls: ToolCall, foreseen: tuple[ToolCall, ...] = ()) -> ReplayedTurn:
    """A turn of 1.3 seconds, in which READ and OTHER change nothing."""
    reads = frozenset(call.identity for call in calls if call != WRITE)
    predicted = tuple(CallPrediction(call, 1.0, 1.0, 0) for call in foreseen)
    return ReplayedTurn(50, 50, calls, CallForecast(predicted, ()), reads, WRITE not in calls)


def waited(*turns: ReplayedTurn) -> float:
    """The seconds for which a session waits for its tools, of 2 seconds each, after what was foreseen is started."""
    times = session_times([turns], 2.0, lambda turn, _: turn.top)
    assert times.used <= times.starts
    return times.early - sum(one.seconds for one in turns)


def test_a_start_saves_what_ran_before_its_call() -> None:
    assert waited(turn(READ)) == pytest.approx(2.0)
    assert waited(turn(READ, foreseen=(READ,))) == pytest.approx(0.7)
    assert waited(turn(OTHER, foreseen=(READ,)), turn(READ)) == pytest.approx(2.0)
    assert waited(turn(foreseen=(READ,)), turn(READ)) == pytest.approx(0.0)  # while the user reads


def test_a_start_is_used_once_and_not_after_a_change() -> None:
    assert waited(turn(READ, foreseen=(READ,)), turn(READ)) == pytest.approx(2.7)
    assert waited(turn(WRITE, foreseen=(READ,)), turn(READ)) == pytest.approx(4.0)


def test_a_start_is_of_no_use_when_it_is_too_old() -> None:
    quick, slow = ([turn(foreseen=(READ,)), *[turn()] * count, turn(READ)] for count in (1, 3))
    assert waited(*quick) == pytest.approx(0.0) and waited(*slow) == pytest.approx(2.0)
