"""An OpenAI-compatible endpoint in a thread: calls the tool asked for, fills in schemas, echoes plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from agentspec.testing import Answer, FakeBackend
from agentspec.types import Speculation
from tests.proxy.conftest import Received, ScriptedUpstream, run_gateway


class ScriptedServer:
    """`bodies` and `request_headers` are what came in; statuses in `failures` are answered first, one a request."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.request_headers: list[dict[str, str]] = []
        self.failures: list[int] = []
        self.upstream = ScriptedUpstream(self._script)
        self.base_url = self.upstream.url

    def _script(self, request: Received) -> None:
        if request.method != "POST":
            return request.answer(b"{}", 501)
        self.bodies.append(request.json)
        self.request_headers.append(request.headers)
        if self.failures:
            return request.answer(b'{"error": {"message": "scripted"}}', self.failures.pop(0), retry_after="0")
        events = [*map(json.dumps, _chunks(request.json)), "[DONE]"]
        return request.answer("".join(f"data: {one}\n\n" for one in events).encode(), 200, "text/event-stream")


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    try:
        yield server
    finally:
        server.upstream.close()


@pytest.fixture
def gateway() -> Iterator[tuple[str, FakeBackend]]:
    """A real gateway on a free port, and the scripted backend behind it."""
    speculation = Speculation(drafted=5, accepted=4, steps=2, estimated_seconds_saved=0.125)
    backend = FakeBackend(Answer(text="hello from behind", speculation=speculation))
    with run_gateway({"fake": backend}) as running:
        yield f"{running.url}/v1", backend


def _chunks(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    deltas, reason = _answer(body)
    common = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": body["model"], "usage": None}
    for delta in [{"role": "assistant", "content": ""}, *deltas]:
        yield common | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield common | {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}
    usage = {"prompt_tokens": 11, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    speculation = {"drafted": 6, "accepted": 3, "steps": 2, "estimated_seconds_saved": 0.5}
    yield common | {"choices": [], "usage": usage, "speculation": speculation}


def _answer(body: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    last = body["messages"][-1]
    choice = body.get("tool_choice", "auto")
    if body.get("tools") and choice != "none" and last["role"] == "user":
        named = choice["function"]["name"] if isinstance(choice, dict) else body["tools"][0]["function"]["name"]
        tool = next(tool["function"] for tool in body["tools"] if tool["function"]["name"] == named)
        return _call(tool["name"], json.dumps(_filled(tool.get("parameters", {}), _quoted(last)))), "tool_calls"
    wanted = body.get("response_format", {})
    if wanted.get("type") == "json_schema":
        return _pieces(json.dumps(_filled(wanted["json_schema"]["schema"], _quoted(last)))), "stop"
    if wanted.get("type") == "json_object":
        return _pieces('{"setup": "why", "punchline": "because"}'), "stop"
    thoughts = [{"reasoning_content": piece} for piece in ("let me ", "think")]
    return [*thoughts, *_pieces("a plain answer to it")], "stop"


def _call(name: str, arguments: str) -> list[dict[str, Any]]:
    """The call's head, then its arguments in two pieces."""
    half = len(arguments) // 2
    head = {"index": 0, "id": "call_1", "type": "function", "function": {"name": name, "arguments": ""}}
    pieces = [{"index": 0, "function": {"arguments": piece}} for piece in (arguments[:half], arguments[half:])]
    return [{"tool_calls": [piece]} for piece in (head, *pieces)]


def _quoted(message: dict[str, Any]) -> str:
    """What a message puts in quotation marks."""
    found = re.search("'(.*?)'", str(message.get("content")))
    return found[1] if found else "text"


def _pieces(text: str) -> list[dict[str, Any]]:
    return [{"content": text[at : at + 4]} for at in range(0, len(text), 4)]


def _filled(schema: dict[str, Any], text: str) -> Any:
    """A value that a schema allows, with `text` for every string."""
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type") or next((one.get("type") for one in schema.get("anyOf", [])), "string")
    if kind == "object":
        return {name: _filled(part, text) for name, part in schema.get("properties", {}).items()}
    return {"integer": 3, "number": 3.0, "boolean": True, "array": [], "null": None}.get(kind, text)
