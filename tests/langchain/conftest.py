"""An OpenAI-compatible endpoint in a thread: calls the tool asked for, fills in schemas, echoes plain text."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import uvicorn

from agentspec.proxy import create_app
from agentspec.runtime import Runtime
from agentspec.testing import Answer, FakeBackend
from agentspec.types import Speculation


class ScriptedServer(ThreadingHTTPServer):
    """`bodies` and `request_headers` are what came in; statuses in `failures` are answered first, one a request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.request_headers: list[dict[str, str]] = []
        self.failures: list[int] = []

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def gateway() -> Iterator[tuple[str, FakeBackend]]:
    """A real gateway on a free port, and the scripted backend behind it."""
    speculation = Speculation(drafted=5, accepted=4, steps=2, estimated_seconds_saved=0.125)
    backend = FakeBackend(Answer(text="hello from behind", speculation=speculation))
    listener = socket.create_server(("127.0.0.1", 0))
    runtime = Runtime(backends={"fake": backend})
    server = uvicorn.Server(uvicorn.Config(create_app(runtime), lifespan="on", log_config=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not (server.started and runtime.ready):
        time.sleep(0.02)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1", backend
    server.should_exit = True
    thread.join()
    listener.close()


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        self.server.request_headers.append({name.lower(): value for name, value in self.headers.items()})
        if self.server.failures:
            self._send(self.server.failures.pop(0), "application/json", b'{"error": {"message": "scripted"}}')
            return
        events = [*map(json.dumps, _chunks(body)), "[DONE]"]
        self._send(200, "text/event-stream", "".join(f"data: {event}\n\n" for event in events).encode())

    def _send(self, status: int, content_type: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(data)))
        self.send_header("retry-after", "0")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None: ...


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
