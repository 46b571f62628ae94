"""Sessions as each coding agent writes them, the same short conversation with a secret in every kind of place."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

# In the form of real keys, and keys of nobody.
SECRETS = {
    "asked": "sk-proj-a1B2c3D4e5F6g7H8i9J0k1L2",
    "written": "ghp_A1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6",
    "argument": "AKIA2E4G6I8K0M2O4Q6S",
    "result": "xoxb-123456789012-abcdefGHIJKL",
    "thought": "hf_AbCdEfGhIjKlMnOpQrStUvWx",
}
TASK = f"Fix the login. The key is {SECRETS['asked']}"
FIRST = f"I look at the settings first, with {SECRETS['written']}."
THOUGHT = f"The user gave {SECRETS['thought']}, so I read."
ARGUMENTS = {"path": "settings.py", "env": f"AWS_ACCESS_KEY_ID={SECRETS['argument']}"}
RESULT = f'slack = "{SECRETS["result"]}"\nDEBUG = True'
LAST = "The login is fixed: the settings were read too late."

Write = Callable[[Path], Path]


def jsonl(path: Path, *records: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def claude_code(folder: Path) -> Path:
    def line(uuid: str, parent: str | None, kind: str, message: dict[str, Any], **more: Any) -> dict[str, Any]:
        known = {"sessionId": "s1", "cwd": "/p", "version": "2.1.0", "isSidechain": False, "userType": "external"}
        return {
            **known, "type": kind, "uuid": uuid, "parentUuid": parent, "message": message,
            "timestamp": "2026-01-20T11:57:17.716Z", **more,
        }  # fmt: skip

    def said(id: str, block: dict[str, Any], stop: str | None = None) -> dict[str, Any]:
        return {
            "id": id,
            "type": "message",
            "role": "assistant",
            "model": "claude",
            "content": [block],
            "stop_reason": stop,
        }

    use = {"type": "tool_use", "id": "t1", "name": "Read", "input": ARGUMENTS}
    other = {"type": "tool_use", "id": "t2", "name": "Glob", "input": {"pattern": "*"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": RESULT}
    second = {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "settings.py"}]}
    return jsonl(
        folder / "-p" / "s1.jsonl",
        {"type": "file-history-snapshot", "messageId": "m0", "snapshot": {}},
        {"type": "summary", "summary": "Fix", "leafUuid": "u9"},
        line("u1", None, "user", {"role": "user", "content": TASK}),
        line("u2", "u1", "assistant", said("m1", {"type": "thinking", "thinking": THOUGHT, "signature": "x"})),
        line("u3", "u2", "assistant", said("m1", {"type": "text", "text": FIRST})),
        line("u4", "u3", "assistant", said("m1", use)),
        line("u5", "u4", "assistant", said("m1", other, "tool_use")),
        line("u6", "u4", "user", {"role": "user", "content": [result]}, toolUseResult={"type": "text"}),
        line("u7", "u5", "user", {"role": "user", "content": [second]}),
        {"type": "system", "uuid": "u8", "parentUuid": "u7", "subtype": "info", "sessionId": "s1"},
        line("u9", "u8", "assistant", said("m2", {"type": "text", "text": LAST}, "end_turn")),
    )


def codex(folder: Path) -> Path:
    def item(**payload: Any) -> dict[str, Any]:
        return {"timestamp": "2026-01-20T11:57:17.716Z", "type": "response_item", "payload": payload}

    text = {"type": "output_text"}
    return jsonl(
        folder / "2026" / "01" / "20" / "rollout-2026-01-20T11-57-17-s1.jsonl",
        {"timestamp": "2026-01-20T11:57:17Z", "type": "session_meta", "payload": {"id": "s1", "cwd": "/p"}},
        item(type="message", role="user", content=[{"type": "input_text", "text": TASK}]),
        {
            "timestamp": "2026-01-20T11:57:17Z",
            "type": "event_msg",
            "payload": {"type": "user_message", "message": TASK},
        },
        {"timestamp": "2026-01-20T11:57:17Z", "type": "turn_context", "payload": {"cwd": "/p", "model": "m"}},
        item(
            type="reasoning", summary=[], content=[{"type": "reasoning_text", "text": THOUGHT}], encrypted_content=None
        ),
        item(type="message", role="assistant", content=[{**text, "text": FIRST}]),
        item(type="function_call", name="Read", arguments=json.dumps(ARGUMENTS), call_id="t1"),
        item(type="function_call", name="Glob", arguments='{"pattern": "*"}', call_id="t2"),
        item(type="function_call_output", call_id="t1", output=RESULT),
        item(type="function_call_output", call_id="t2", output="settings.py"),
        item(type="message", role="assistant", content=[{**text, "text": LAST}]),
    )


def pi(folder: Path) -> Path:
    def entry(id: str, parent: str | None, message: dict[str, Any]) -> dict[str, Any]:
        at = "2026-01-20T11:57:17.716Z"
        return {"type": "message", "id": id, "parentId": parent, "timestamp": at, "message": message}

    def call(id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"type": "toolCall", "id": id, "name": name, "arguments": arguments}

    blocks = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": FIRST}]
    calls = [call("t1", "Read", ARGUMENTS), call("t2", "Glob", {"pattern": "*"})]
    first = {"role": "assistant", "content": [*blocks, *calls], "stopReason": "toolUse", "model": "m"}
    results = [
        {"role": "toolResult", "toolCallId": id, "toolName": name, "content": [{"type": "text", "text": text}]}
        for id, name, text in (("t1", "Read", RESULT), ("t2", "Glob", "settings.py"))
    ]
    return jsonl(
        folder / "--p--" / "2026-01-20_s1.jsonl",
        {"type": "session", "version": 3, "id": "s1", "timestamp": "2026-01-20T11:57:17.716Z", "cwd": "/p"},
        entry("a", None, {"role": "user", "content": [{"type": "text", "text": TASK}]}),
        {"type": "model_change", "id": "b", "parentId": "a", "timestamp": "2026-01-20T11:57:17Z", "modelId": "m"},
        entry("c", "b", first),
        entry("d", "c", results[0]),
        entry("e", "d", results[1]),
        entry("f", "e", {"role": "assistant", "content": [{"type": "text", "text": LAST}], "stopReason": "stop"}),
    )


def _opencode() -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    def tool(id: str, name: str, given: dict[str, Any], output: str) -> dict[str, Any]:
        state = {"status": "completed", "input": given, "output": output, "title": name, "metadata": {}}
        return {"type": "tool", "tool": name, "callID": id, "state": state}

    at = {"time": {"created": 1768910237716, "completed": 1768910237716}}
    steps = [
        {"type": "step-start"},
        {"type": "reasoning", "text": THOUGHT},
        {"type": "text", "text": FIRST},
        tool("t1", "Read", ARGUMENTS, RESULT),
        tool("t2", "Glob", {"pattern": "*"}, "settings.py"),
        {"type": "step-finish", "reason": "tool-calls"},
        {"type": "step-start"},
        {"type": "text", "text": LAST},
        {"type": "step-finish", "reason": "stop"},
    ]
    return [
        ({"role": "user", **at}, [{"type": "text", "text": TASK}]),
        ({"role": "assistant", **at, "finish": "stop"}, steps),
    ]


def opencode_storage(folder: Path) -> Path:
    storage = folder / "storage"
    jsonl(storage / "session" / "global" / "s1.json", {"id": "s1", "title": "Fix"})
    for number, (message, parts) in enumerate(_opencode()):
        jsonl(storage / "message" / "s1" / f"msg_{number}.json", {"id": f"msg_{number}", "sessionID": "s1", **message})
        for place, part in enumerate(parts):
            jsonl(storage / "part" / f"msg_{number}" / f"prt_{place}.json", part)
    return storage


def opencode_database(folder: Path) -> Path:
    path = folder / "opencode.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE session (id TEXT PRIMARY KEY, title TEXT)")
        database.execute("CREATE TABLE message (id TEXT PRIMARY KEY, session_id TEXT, time_created INTEGER, data TEXT)")
        database.execute("CREATE TABLE part (id TEXT PRIMARY KEY, message_id TEXT, session_id TEXT, data TEXT)")
        database.execute("INSERT INTO session VALUES ('s1', 'Fix')")
        for number, (message, parts) in enumerate(_opencode()):
            database.execute("INSERT INTO message VALUES (?, 's1', 1, ?)", (f"msg_{number}", json.dumps(message)))
            for place, part in enumerate(parts):
                row = (f"prt_{number}{place}", f"msg_{number}", json.dumps(part))
                database.execute("INSERT INTO part VALUES (?, ?, 's1', ?)", row)
        database.commit()
    return path


def aider_chat(folder: Path) -> Path:
    path = folder / ".aider.chat.history.md"
    path.write_text(
        f"\n# aider chat started at 2026-01-20 11:57:17\n\n> Aider v0.80.0  \n> {RESULT.splitlines()[0]}  \n\n"
        f"#### {TASK}  \n\n{FIRST}\n\n> Applied edit to settings.py  \n\n#### go on  \n\n{LAST}\n\n> Tokens: 2k sent\n"
    )
    return path


def aider_calls(folder: Path) -> Path:
    path = folder / "llm.history"
    path.write_text(
        f"TO LLM 2026-01-20T11:57:17\n-------\nSYSTEM Act as an expert.\nSYSTEM \nSYSTEM {RESULT.splitlines()[0]}\n"
        f"-------\nUSER {TASK}\nLLM RESPONSE 2026-01-20T11:57:20\nASSISTANT {FIRST}\n"
        "TO LLM 2026-01-20T11:58:17\n-------\nSYSTEM Act as an expert.\n"
        f"-------\nUSER {TASK}\n-------\nASSISTANT {FIRST}\n"
        f"-------\nUSER go on\nLLM RESPONSE 2026-01-20T11:58:20\nASSISTANT {LAST}\nASSISTANT \nASSISTANT Done.\n"
    )
    return path


def _chat() -> list[dict[str, Any]]:
    def call(id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}

    calls = [call("t1", "Read", ARGUMENTS), call("t2", "Glob", {"pattern": "*"})]
    return [
        {"role": "user", "content": TASK},
        {"role": "assistant", "content": FIRST, "reasoning_content": THOUGHT, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": RESULT},
        {"role": "tool", "tool_call_id": "t2", "content": "settings.py"},
        {"role": "assistant", "content": LAST},
    ]


def swe_agent(folder: Path) -> Path:
    path = folder / "task-1" / "task-1.traj"
    path.parent.mkdir()
    demonstration = [{"role": "user", "content": "Like this", "is_demo": True}]
    demonstration.append({"role": "assistant", "content": "ls", "is_demo": True})
    history = [{"agent": "main", "message_type": "action", **message} for message in _chat()]
    path.write_text(json.dumps({"trajectory": [], "history": [*demonstration, *history], "info": {}}, indent=2))
    return path


def mini_swe_agent(folder: Path) -> Path:
    path = folder / "task-1.traj.json"
    messages = [*({**message, "extra": {}} for message in _chat()), {"role": "exit", "content": "", "extra": {}}]
    path.write_text(json.dumps({"info": {}, "messages": messages, "trajectory_format": "mini-swe-agent-1.1"}, indent=2))
    return path


def responses_log(folder: Path) -> Path:
    items = [json.loads(line)["payload"] for line in codex(folder / "c").read_text().splitlines() if "_item" in line]
    requests = [items[:1], items[:7]]
    outputs = [items[1:5], items[7:]]
    lines = [
        {
            "session": "s1",
            "request": {"model": "m", "instructions": "Be brief.", "input": given},
            "response": {"object": "response", "created_at": 1768910237, "status": "completed", "output": output},
        }
        for given, output in zip(requests, outputs, strict=True)
    ]
    (folder / "c" / "2026").rename(folder / "elsewhere")
    return jsonl(folder / "responses.jsonl", *lines)


def messages_log(folder: Path) -> Path:
    use = [{"type": "tool_use", "id": "t1", "name": "Read", "input": ARGUMENTS}]
    use.append({"type": "tool_use", "id": "t2", "name": "Glob", "input": {"pattern": "*"}})
    first = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": FIRST}, *use]
    results = [{"type": "tool_result", "tool_use_id": "t1", "content": RESULT}]
    results.append({"type": "tool_result", "tool_use_id": "t2", "content": "settings.py"})
    asked = {"role": "user", "content": [{"type": "text", "text": TASK}]}
    turns = [
        ([asked], first),
        ([asked, {"role": "assistant", "content": first}, {"role": "user", "content": results}], None),
    ]
    return jsonl(
        folder / "messages.jsonl",
        *(
            {
                "session": "s1",
                "request": {"model": "m", "system": "Be brief.", "messages": messages, "max_tokens": 9},
                "response": {
                    "type": "message",
                    "role": "assistant",
                    "content": content or [{"type": "text", "text": LAST}],
                    "stop_reason": "end_turn",
                },
            }
            for messages, content in turns
        ),
    )


WITH_TOOLS: dict[str, Write] = {
    "claude-code": claude_code,
    "codex": codex,
    "pi": pi,
    "opencode": opencode_storage,
    "opencode database": opencode_database,
    "swe-agent": swe_agent,
    "swe-agent mini": mini_swe_agent,
    "log of responses": responses_log,
    "log of messages": messages_log,
}
WRITERS = {**WITH_TOOLS, "aider": aider_chat, "aider calls": aider_calls}


@pytest.fixture(params=WRITERS)
def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """The format's name and a file (or folder) of that format."""
    return request.param.split()[0], WRITERS[request.param](tmp_path)


@pytest.fixture(params=WITH_TOOLS)
def with_tools(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file of a format that keeps calls of tools."""
    return WITH_TOOLS[request.param](tmp_path)
