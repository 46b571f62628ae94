"""Sessions as each coding agent writes them, the same short conversation with a secret in every kind of place."""

from __future__ import annotations

import json
from collections.abc import Callable
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


WRITERS: dict[str, Write] = {
    "claude-code": claude_code,
    "codex": codex,
    "log of responses": responses_log,
    "log of messages": messages_log,
}


@pytest.fixture(params=WRITERS)
def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """The format's name and a file (or folder) of that format."""
    return request.param.split()[0], WRITERS[request.param](tmp_path)
