"""Sessions in real time: the engine writes the script, tools start early, and transcripts stay the same."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from agentspec.backends.settings import TorchSettings
from agentspec.benchmarks.agent_tools.recorded import VOID, RecordedSession, RecordedTools, sessions_of
from agentspec.benchmarks.agent_tools.scripted import ScriptedBackend
from agentspec.benchmarks.agent_tools.timed import TimedPlan, run_agent_timed
from agentspec.benchmarks.agent_tools.timed_report import DRAFTING, OFF, PREFILL, TOOLS, VARIANTS
from agentspec.benchmarks.report import print_report
from agentspec.errors import ConfigurationError
from agentspec.recordings.calls import RecordedCall
from agentspec.recordings.formats import detect, read
from agentspec.tools.prediction.history import ToolCall
from agentspec.types import Labels


def call(name: str, **arguments: object) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def write(path: Path, count: int) -> Path:
    """Sessions in which the agent reads what the user names, and its order, changes it, and reads it again."""
    lines = []
    for number in range(101, 101 + count):
        user, order = f"ann_{number}", f"#W{number}"
        said = [
            ("user", f"I am {user}", call("get_user", id=user)),
            ("tool", json.dumps({"order": order}), call("get_order", order=order)),
            ("tool", json.dumps({"total": number}), call("pay", order=order)),
            ("tool", "paid", call("get_order", order=order)),
            ("tool", json.dumps({"total": 0}), "done"),
        ]
        for step, (role, content, response) in enumerate(said):
            delta = [{"role": role, "content": content}]
            record = {"source": "t", "session": str(number), "step": step, "messages_delta": delta}
            lines.append(json.dumps({**record, "response": response}))
    path.write_text("\n".join(lines))
    return path


def sessions(path: Path, most_turns: int = 9) -> list[RecordedSession]:
    return sessions_of(read(path, detect(path)), most_turns)


def test_counts_of_real_sessions(tiny_model: Path, tmp_path: Path) -> None:
    path, told = write(tmp_path / "sessions.jsonl", 4), list[str]()
    plan = TimedPlan(["get_*"], sessions=2, tool_seconds=0.05, user_seconds=0.0)
    found = run_agent_timed(str(tiny_model), [path], plan, told.append)
    (file,) = found.files
    assert [file.same(variant) for variant in VARIANTS] == [2, 2, 2, 2]
    assert "done" in file.sessions[OFF][0].transcript and VOID not in file.sessions[TOOLS][0].transcript
    assert file.total(OFF, "steps") == file.total(OFF, "tokens") > 2 * file.total(DRAFTING, "steps")
    assert file.total(OFF, "starts") == file.total(DRAFTING, "starts") == 0
    for variant in (TOOLS, PREFILL):
        assert 0 < file.total(variant, "used") <= min(6, file.total(variant, "starts"))
    order = [line.rpartition(", ")[2] for line in told if "of 2" in line]
    assert order == [*VARIANTS, *VARIANTS[1:], OFF]
    with Console(width=200, record=True) as console:
        print_report(found, console)
    assert "in real time" in console.export_text() and len(found.data()["files"]) == 1


def test_a_file_without_calls_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "plain.jsonl"
    delta = [{"role": "user", "content": "hi"}]
    path.write_text(
        json.dumps({"source": "t", "session": "1", "step": 0, "messages_delta": delta, "response": "hello"})
    )
    with pytest.raises(ConfigurationError, match="no session calls tools"):
        run_agent_timed(str(tiny_model), [path], TimedPlan(["get_*"]), lambda _: None)


def test_tools_return_what_is_recorded_from_now_on(tmp_path: Path) -> None:
    (session,) = sessions(write(tmp_path / "one.jsonl", 1))
    tools, order = RecordedTools(session, ["get_user", "get_order"], 0.0), ToolCall("get_order", {"order": "#W101"})

    def result(turn: int, one: ToolCall) -> str:
        tools.turn = turn
        return asyncio.run(tools.run(one))

    assert [result(turn, order) for turn in range(5)] == ['{"total": 101}'] * 2 + [VOID, '{"total": 0}', "nothing"]
    assert result(0, ToolCall("get_order", {"order": "#W9"})) == VOID
    assert len(sessions(tmp_path / "one.jsonl", 2)[0].turns) == 2


def unnamed(*said: str) -> RecordedCall:
    """A call without a session's name, after these messages."""
    messages = [{"role": "user", "content": one} for one in said]
    return RecordedCall("a file", Labels(), messages, {"role": "assistant", "content": call("get", id=said[-1])})


def test_sessions_without_a_name_are_told_apart() -> None:
    first, second = [unnamed("a"), unnamed("a", "b")], [unnamed("a")]
    found = sessions_of([*first, *second, *second], 9)
    assert [[len(turn.heard) for turn in one.turns] for one in found] == [[1, 1], [1], [1]]
    assert len({one.name for one in found}) == 3


def test_equal_sessions_count_each_by_itself(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three sessions that hold the same, one is timed and the others are learned."""
    path, told = write(tmp_path / "same.jsonl", 1), list[str]()
    (session,) = sessions(path, 2)
    same = [replace(session) for _ in range(3)]
    monkeypatch.setattr("agentspec.benchmarks.agent_tools.timed.sessions_of", lambda *_: same)
    plan = TimedPlan(["get_*"], sessions=1, tool_seconds=0.0, user_seconds=0.0)
    (file,) = run_agent_timed(str(tiny_model), [path], plan, told.append).files
    assert len(file.sessions[OFF]) == 1 and sum("learning" in line for line in told) == 2


def test_the_engine_says_the_script_drafted_or_not(tiny_model: Path) -> None:
    from agentspec.benchmarks.runs import ask
    from agentspec.types import SamplingParams

    async def said(speculation: bool) -> tuple[str, int]:
        backend = ScriptedBackend.load(TorchSettings(model=str(tiny_model)))
        assert isinstance(backend, ScriptedBackend)
        count = backend.says("abcabcabcabcabcabcabcabc!")
        greedy = SamplingParams(temperature=0.0, max_tokens=count)
        run = await ask(backend, backend.encode("say abcabcabc"), greedy, "t", speculation=speculation)
        await backend.aclose()
        return backend.decode(run.tokens), run.speculation.steps if run.speculation else len(run.tokens)

    (plain, steps), (drafted, fewer) = (asyncio.run(said(speculation)) for speculation in (False, True))
    assert plain == drafted == "abcabcabcabcabcabcabcabc!"
    assert fewer < steps == 26
