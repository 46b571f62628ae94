from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentspec.recordings.calls import BadLineError
from agentspec.recordings.formats import Format, detect, files_of, read
from agentspec.recordings.redaction import Redaction
from tests.instructions import counted_instructions
from tests.recordings.conftest import SECRETS, SESSIONS, Write, claude_code

TASK = f"Fix the login. The key is {SECRETS['asked']}"
FIRST = f"I look at the settings first, with {SECRETS['written']}."
THOUGHT = f"The user gave {SECRETS['thought']}, so I read."
ARGUMENTS = {"path": "settings.py", "env": f"AWS_ACCESS_KEY_ID={SECRETS['argument']}"}
RESULT = f'slack = "{SECRETS["result"]}"\nDEBUG = True'
LAST = "The login is fixed: the settings were read too late."


def text_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def test_a_session_is_recognised_and_its_answers_are_found(recorded: tuple[str, Path]) -> None:
    name, path = recorded
    unknown: list[Path] = []
    assert detect(path) == name and list(files_of(path, unknown.append)) == [path] and not unknown
    first, last = read(path, Format(name))
    assert first.messages[-1] == {"role": "user", "content": TASK} and first.answer["content"] == FIRST
    assert last.answer["content"].startswith(LAST) and len(last.messages) > len(first.messages)
    assert first.finished and last.finished
    assert first.labels == last.labels
    calls = [call["function"] for call in first.answer["tool_calls"]]
    assert [(one["name"], json.loads(one["arguments"])) for one in calls] == [
        ("Read", ARGUMENTS), ("Glob", {"pattern": "*"}),
    ]  # fmt: skip
    assert first.answer["reasoning_content"] == THOUGHT
    results = [{"role": "tool", "tool_call_id": "t1", "content": RESULT}]
    results.append({"role": "tool", "tool_call_id": "t2", "content": "settings.py"})
    assert list(last.messages[-3:]) == [first.answer, *results]


def test_every_secret_is_redacted(recorded: tuple[str, Path]) -> None:
    name, path = recorded
    calls = list(read(path, Format(name)))
    text = text_of([[list(call.messages), call.answer] for call in calls])
    assert SECRETS["asked"] in text and SECRETS["written"] in text
    safe = [Redaction().call(call) for call in calls]
    text = text_of([[list(call.messages), call.answer, repr(call.labels)] for call in safe])
    assert not [secret for secret in SECRETS.values() if secret in text or secret[8:] in text]
    assert "settings.py" in text


def test_an_unfinished_last_line_is_skipped(tmp_path: Path) -> None:
    path = claude_code(tmp_path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:-20])
    assert len(list(read(path, Format.claude_code))) == 1
    path.write_text("".join(lines[:-1]) + lines[-1].rstrip("\n"))
    assert len(list(read(path, Format.claude_code))) == 2
    path.write_text("".join([*lines[:-1], "{no json}\n", lines[-1]]))
    with pytest.raises(BadLineError, match=rf"{path}:{len(lines)}"):
        list(read(path, Format.claude_code))


def test_a_branch_has_only_its_own_messages(tmp_path: Path) -> None:
    """In a session one may go back and ask something else."""
    path = claude_code(tmp_path)
    asked = json.loads(path.read_text().splitlines()[2])
    other = asked | {"uuid": "v1", "parentUuid": None, "message": {"role": "user", "content": "Else?"}}
    said = {"id": "m3", "role": "assistant", "content": [{"type": "text", "text": "No."}], "stop_reason": "max_tokens"}
    reply = other | {"type": "assistant", "uuid": "v2", "parentUuid": "v1", "message": said}
    error = reply | {"uuid": "v3", "isApiErrorMessage": True, "message": said | {"id": "m4"}}
    with path.open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in (other, reply, error))
    *_, last = calls = list(read(path, Format.claude_code))
    assert (len(calls), list(last.messages)) == (3, [{"role": "user", "content": "Else?"}])
    assert last.answer["content"] == "No." and not last.finished


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def read_file(path: str | None) -> dict[str, Any]:
    return {"type": "tool_use", "id": "t1", "name": "Read", "input": {"path": path} if path else {}}


@pytest.mark.parametrize(
    "snapshots",
    [
        [[said("I")], [said("I read")], [said("I read it.")], [read_file("a.py")]],
        [[said("I re"), read_file(None)], [said("I read it."), read_file("a.py")]],
        [
            [{"type": "thinking", "thinking": "Hm"}],
            [said("")],
            [said("I read it.")],
            [read_file(None)],
            [read_file("a.py")],
        ],
        [[said("I read it."), read_file("a.py")], [said("I read it."), read_file("a.py")]],
        [[read_file("a.py")], "I read", "I read it."],
    ],
)
@pytest.mark.parametrize("chained", [True, False])
def test_an_answer_with_earlier_snapshots_is_read_once(write: Write, snapshots: list[Any], chained: bool) -> None:
    """A line for each block, or for all so far; each behind the one before, or all behind the question."""
    asked = {
        "sessionId": "s",
        "type": "user",
        "uuid": "u",
        "parentUuid": None,
        "message": {"role": "user", "content": "?"},
    }
    lines = [asked, asked]
    for number, content in enumerate(snapshots):
        message = {"id": "m", "role": "assistant", "content": content, "stop_reason": None}
        parent = f"a{number - 1}" if number and chained else "u"
        lines.append(
            {"type": "assistant", "uuid": f"a{number}", "parentUuid": parent, "message": message, "requestId": "r"}
        )
    last = {"id": "n", "role": "assistant", "content": [said("Done.")], "stop_reason": "end_turn"}
    error = last | {"id": "e", "model": "<synthetic>", "content": [said("API Error")]}
    parent = f"a{len(snapshots) - 1}"
    lines.append({"type": "assistant", "uuid": "e", "parentUuid": parent, "message": error, "isApiErrorMessage": True})
    lines.append({"type": "assistant", "uuid": "l", "parentUuid": parent, "message": last})
    first, second = read(write(*lines), Format.claude_code)
    assert first.answer["content"] == "I read it."
    [call] = first.answer["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"path": "a.py"}
    assert list(second.messages) == [{"role": "user", "content": "?"}, first.answer]


def test_a_long_session_is_read_once_and_not_once_for_each_answer(tmp_path: Path) -> None:
    def cost(turns: int) -> int:
        lines = [json.loads(line) for line in claude_code(tmp_path).read_text().splitlines()]
        written = [line for line in lines if "message" in line][:-1]
        repeated = json.dumps(written)
        path = tmp_path / "long.jsonl"
        with path.open("w") as file:
            last = None
            for turn in range(turns):
                again = json.loads(re.sub(r'"([umt]\d)"', rf'"{turn}-\1"', repeated))
                again[0]["parentUuid"], last = last, again[-1]["uuid"]
                file.writelines(f"{json.dumps(line)}\n" for line in again)
        with counted_instructions("json") as count:
            *_, call = read(path, Format.claude_code)
        assert len(call.messages) == 4 * turns - 3
        return count()

    assert cost(20) < 2.2 * cost(10)


def test_after_a_compaction_the_history_is_the_summary(write: Write) -> None:
    kept = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "All was read."}]}
    said = kept | {"content": [{"type": "output_text", "text": "Next."}]}
    new = (("compacted", {"message": "", "replacement_history": [kept]}), ("response_item", said))
    added = [{"timestamp": "2026-01-20T11:57:17Z", "type": kind, "payload": payload} for kind, payload in new]
    path = write(*(SESSIONS / "codex.jsonl").read_text().splitlines(), *added)
    *_, last = calls = list(read(path, Format.codex))
    assert [message["content"] for message in last.messages] == ["All was read."] and len(calls) == 3


def test_folders_are_searched_without_following_links(tmp_path: Path) -> None:
    path = claude_code(tmp_path / "projects")
    (path.parent / "notes.txt").write_text("no session\n")
    (path.parent / "linked.jsonl").symlink_to(path)
    unknown: list[Path] = []
    assert list(files_of(tmp_path, unknown.append)) == [path]
    assert unknown == [path.parent / "notes.txt"]


def test_tools_of_newer_versions_of_codex_are_named_as_their_models_see_them(write: Write) -> None:
    found = {"type": "namespace", "name": "mcp__disk", "tools": [{"type": "function", "name": SECRETS["result"]}]}
    search = {"call_id": "t1", "execution": "client", "status": "completed"}
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": TASK}]},
        {"type": "tool_search_call", **search, "arguments": {"query": SECRETS["asked"]}},
        {"type": "tool_search_output", **search, "tools": [found]},
        {"type": "function_call", "name": "read", "namespace": "mcp__disk", "arguments": "{}", "call_id": "t2"},
        {"type": "custom_tool_call", "name": "exec", "namespace": "functions", "input": '{"a": 1}', "call_id": "t3"},
        {"type": "function_call_output", "call_id": "t2", "output": SECRETS["written"]},
        {"type": "custom_tool_call_output", "call_id": "t3", "output": "done"},
    ]
    head = {"timestamp": "2026-01-20T11:57:17Z", "type": "session_meta", "payload": {"id": "s1", "cwd": "/p"}}
    written = [{"timestamp": "2026-01-20T11:57:17Z", "type": "response_item", "payload": item} for item in items]
    first, last = read(write(head, *written), Format.codex)
    calls = [call["function"] for turn in (first, last) for call in turn.answer["tool_calls"]]
    assert [(one["name"], json.loads(one["arguments"])) for one in calls] == [
        ("tool_search", {"query": SECRETS["asked"]}), ("mcp__disk__read", {}), ("exec", {"input": '{"a": 1}'}),
    ]  # fmt: skip
    assert last.messages[-1]["role"] == "tool" and SECRETS["result"] in last.messages[-1]["content"]
