"""The replay of recorded sessions predicts calls from the past alone, and computes what early starts would save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentspec.benchmarks.agent_tools.replay import AgentToolsReport, run_agent_tools


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


def test_hits_save_time_and_writing_tools_none(recorded: Path) -> None:
    replay = measured(recorded).files[0]
    times = replay.times()
    assert times.plain > times.drafting > times.early
    assert 1.0 < times.speedup < 2.0 and 0 < times.used <= times.starts
    nothing = measured(recorded, read_only=["none"]).files[0]
    times = nothing.times()
    assert (times.speedup, times.starts) == (1.0, 0)
