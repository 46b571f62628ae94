"""Models that do what stands in a prompt: `[[tools cut]]` asks for a call, and for an end in the middle of it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio

from agentspec.backends.base import Capabilities
from agentspec.errors import UpstreamError
from agentspec.testing import Answer, FakeBackend
from agentspec.types import Delta, GenerateRequest, Usage
from tests.matrix.apis import VALUE
from tests.thinking_model import ThinkingModel

WORDS = ("alpha", " beta", " gamma", " delta")
THOUGHTS = ("hm", ", well")
ACCOUNT_KEY = "sk-operators-own-key-0123456789abcdef"
STALLED = ("disconnect", "deadline")
_WISH = re.compile(r"\[\[(\w+) (\w+)\]\]")


def wish_in(prompt: str) -> tuple[str, str]:
    """The content and the ending that a prompt asks for."""
    found = _WISH.search(prompt)
    return (found[1], found[2]) if found else ("plain", "complete")


def pieces_of(content: str) -> list[dict[str, Any]]:
    """An answer as deltas of a chat."""
    thoughts = [{"reasoning_content": text} for text in THOUGHTS] if content == "thoughts" else []
    if content == "tools":
        text = json.dumps(VALUE)
        call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "pick", "arguments": text[:5]}}
        rest = {"index": 0, "function": {"arguments": text[5:]}}
        return [{"tool_calls": [call]}, {"tool_calls": [rest]}]
    words = [json.dumps(VALUE)[:4], json.dumps(VALUE)[4:]] if content == "structured" else WORDS
    return [*thoughts, *({"content": word} for word in words)]


class ScriptedModel:
    """A `Backend` that answers as a prompt asks. `cancelled` counts the answers whose caller left."""

    capabilities = Capabilities()

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.cancelled = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        self.requests.append(request)
        text = request.text or str((request.messages or [{}])[-1].get("content"))
        content, ending = wish_in(text)
        pieces = pieces_of(content)[: request.sampling.max_tokens]
        if ending == "error":
            raise UpstreamError("the model is gone")
        try:
            for number, piece in enumerate(pieces):
                if number == 1 and ending == "cut":
                    raise UpstreamError("the model is gone")
                if number == 1 and ending in STALLED:
                    await anyio.sleep_forever()
                yield Delta(text=piece.get("content", ""), extra={k: v for k, v in piece.items() if k != "content"})
        except (GeneratorExit, anyio.get_cancelled_exc_class()):
            self.cancelled += 1
            raise
        reason: Any = "length" if ending == "length" else "tool_calls" if content == "tools" else "stop"
        yield Delta(finish_reason=reason, usage=Usage(prompt_tokens=7, completion_tokens=len(pieces)))

    async def aclose(self) -> None:
        """Nothing to release."""


class Thinker(ThinkingModel):
    """A small or large model of a delegating strategy, which breaks off or stalls where the prompt asks for it."""

    def __init__(self) -> None:
        super().__init__(lambda thinking: f"step {thinking.count(chr(10)) // 2 + 1}.\n\n")

    def _respond(self, request: GenerateRequest) -> Any:
        return _ending(self.prompt_text(request), lambda: super(Thinker, self)._respond(request))


class Reader(FakeBackend):
    """The model behind speculative retrieval: what it says next depends on every word of its prompt."""

    def __init__(self) -> None:
        super().__init__(self._next)

    def _next(self, request: GenerateRequest) -> Any:
        prompt = self.prompt_text(request)
        word = WORDS[sum(prompt.encode()) % len(WORDS)]
        return _ending(prompt, lambda: Answer(word * 4, finish_reason="length"))


def _ending(prompt: str, answer: Callable[[], Any]) -> Any:
    ending = wish_in(prompt)[1]
    if ending == "cut":
        return UpstreamError("the model is gone")
    return Answer("x", latency=3600) if ending in STALLED else answer()


@dataclass
class Upstream:
    """The script of an OpenAI-compatible server. `native`: it answers Responses and Messages itself.

    `bodies` are those of the requests that it was to answer, with their headers; `left` counts the clients that it saw
    leave.
    """

    native: bool = False
    bodies: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    left: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, request: Any) -> None:
        path = request.target.removeprefix("/v1/")
        if request.method == "GET":
            request.answer(json.dumps({"data": [{"id": "theirs", "owned_by": "vllm"}]}).encode())
        elif path in ("responses", "messages") and not self.native:
            request.answer(b'{"error": {"message": "no such route"}}', 404)
        elif request.body == b"{}":
            request.answer(b'{"error": {"message": "model is missing"}}', 400)  # it has the route
        else:
            self.bodies.append((path, request.headers, request.json))
            self._answer(request, path, request.json)

    def _answer(self, request: Any, path: str, body: dict[str, Any]) -> None:
        content, ending = wish_in(request.body.decode())
        if ending == "error":
            sent = {"message": f"no quota left for key {ACCOUNT_KEY}", "type": "insufficient_quota"}
            request.answer(json.dumps({"error": sent}).encode(), 429)
            return
        events = WIRES[path](content, ending)
        if not body.get("stream"):
            self._send_whole(request, events[-1], ending)
            return
        request.head()
        for number, event in enumerate(events[:-1]):
            if number == 2 and ending in STALLED:
                self._wait(request)
                return
            if number == 2 and ending == "cut":
                return
            name = f"event: {event['type']}\n" if "type" in event else ""
            request.send(f"{name}data: {json.dumps(event)}\n\n".encode())
        if path in ("chat/completions", "completions"):
            request.send(b"data: [DONE]\n\n")

    def _send_whole(self, request: Any, value: Any, ending: str) -> None:
        if ending in STALLED:
            self._wait(request)
        elif ending == "cut":
            request.head(200, "application/json", content_length="1000")
            request.send(b'{"id"')
        else:
            request.answer(json.dumps(value).encode())

    def _wait(self, request: Any) -> None:
        if request.client_left(20):
            with self._lock:
                self.left += 1


Event = dict[str, Any]
_USAGE = {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}


def _chat(content: str, ending: str) -> list[Event]:
    """The chunks of an answer, and last of all the whole of it."""
    pieces = pieces_of(content)
    reason = "length" if ending == "length" else "tool_calls" if content == "tools" else "stop"
    head = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "theirs"}
    chunks = [{**head, "choices": [{"index": 0, "delta": piece, "finish_reason": None}]} for piece in pieces]
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    chunks.append({**head, "choices": [], "usage": _USAGE})
    message: Event = {"role": "assistant", "content": "".join(piece.get("content", "") for piece in pieces) or None}
    if content == "thoughts":
        message["reasoning_content"] = "".join(THOUGHTS)
    if content == "tools":
        function = {"name": "pick", "arguments": json.dumps(VALUE)}
        message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
    choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
    return [*chunks, {**head, "object": "chat.completion", "choices": [choice], "usage": _USAGE}]


def _completion(content: str, ending: str) -> list[Event]:
    reason = "length" if ending == "length" else "stop"
    head = {"id": "c1", "object": "text_completion", "created": 1, "model": "theirs"}
    choices = [{"index": 0, "text": word, "finish_reason": None, "logprobs": None} for word in WORDS]
    last = {"index": 0, "text": "", "finish_reason": reason, "logprobs": None}
    chunks = [{**head, "choices": [choice]} for choice in [*choices, last]]
    whole = {"index": 0, "text": "".join(WORDS), "finish_reason": reason, "logprobs": None}
    return [*chunks, {**head, "choices": [], "usage": _USAGE}, {**head, "choices": [whole], "usage": _USAGE}]


def _responses(content: str, ending: str) -> list[Event]:
    text = "".join(WORDS)
    part = {"type": "output_text", "text": text, "annotations": []}
    message = {"id": "m1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    status = "incomplete" if ending == "length" else "completed"
    cached = {"cached_tokens": 0, "cache_write_tokens": 0}
    details = {"input_tokens_details": cached, "output_tokens_details": {"reasoning_tokens": 0}}
    response: Event = {
        "id": "resp_theirs",
        "object": "response",
        "created_at": 1,
        "model": "theirs",
        "status": status,
        "output": [message],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {"input_tokens": 7, "output_tokens": 4, "total_tokens": 11, **details},
    }
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    where = {"item_id": "m1", "output_index": 0, "content_index": 0, "logprobs": []}
    events: list[Event] = [{"type": "response.created", "response": begun}]
    events += [{"type": "response.output_text.delta", "delta": word, **where} for word in WORDS]
    events.append({"type": f"response.{status}", "response": response})
    return [*({**event, "sequence_number": number} for number, event in enumerate(events)), response]


def _messages(content: str, ending: str) -> list[Event]:
    reason = "max_tokens" if ending == "length" else "end_turn"
    head: Event = {"id": "m1", "type": "message", "role": "assistant", "model": "theirs", "stop_sequence": None}
    usage = {"input_tokens": 7, "output_tokens": 4}
    block: Event = {"type": "text", "text": ""}
    begun = {**head, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
    deltas = [{"type": "text_delta", "text": word} for word in WORDS]
    return [
        {"type": "message_start", "message": begun},
        {"type": "content_block_start", "index": 0, "content_block": block},
        *({"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage},
        {"type": "message_stop"},
        {**head, "content": [{**block, "text": "".join(WORDS)}], "stop_reason": reason, "usage": usage},
    ]


WIRES: dict[str, Callable[[str, str], list[Event]]] = {
    "chat/completions": _chat,
    "completions": _completion,
    "responses": _responses,
    "messages": _messages,
}
