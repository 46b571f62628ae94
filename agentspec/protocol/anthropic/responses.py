"""Writes the answers of `/v1/messages`: one message, or the events of a stream."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agentspec.errors import UpstreamError
from agentspec.protocol.anthropic.requests import MessagesRequest
from agentspec.protocol.errors import anthropic_form
from agentspec.protocol.responses import ApiWriter, speculation_member, thoughts_of
from agentspec.protocol.tools import CUT_OFF, ToolCalls, whole_arguments
from agentspec.types import Delta, Usage

_STOP_REASONS = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
    "cancelled": "max_tokens",
}

SIGNATURE = "unsigned"  # of thoughts: clients require one and send it back; nothing is verified by it
Event = dict[str, Any]


@dataclass(slots=True)
class _OpenBlock:
    """The content block that is being written."""

    index: int
    kind: str
    call: int | None = None  # the number of the tool call


@dataclass(slots=True)
class MessagesWriter(ApiWriter):
    """Writes one answer. Blank text before a thought, a call or the end makes no block of its own.

    In a whole message the `input` of a call is an object, so a call that has none, or was cut off, is a text there.
    """

    named = True
    end = b""
    model: str
    request: MessagesRequest
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}", init=False)
    _begun: bool = field(default=False, init=False)
    _blocks: int = field(default=0, init=False)
    _calls: ToolCalls = field(default_factory=ToolCalls, init=False)
    _begun_calls: int = field(default=0, init=False)
    _open: _OpenBlock | None = field(default=None, init=False)
    _blank: str = field(default="", init=False)
    _refused: bool = field(default=False, init=False)
    _waiting: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict, init=False)  # pieces of later calls

    def failed(self, error: dict[str, Any], status: int, request_id: str) -> dict[str, Any]:
        return anthropic_form(error, status, request_id)

    def add(self, delta: Delta) -> None:
        self.answer.add(self._readable(delta))

    def _readable(self, delta: Delta) -> Delta:
        """`delta` with a refusal as text, for which the API has no place, and as why the answer ended."""
        refusal = delta.extra.get("refusal")
        text = refusal if isinstance(refusal, str) else ""
        self._refused = self._refused or bool(text)
        if not self._refused:
            return delta
        return replace(delta, text=delta.text + text, finish_reason=delta.finish_reason and "content_filter")

    def body(self) -> dict[str, Any]:
        _, choice = self.answer.all()[0]
        calls = choice.extra.get("tool_calls") or ()
        text, thoughts = "".join(choice.text), thoughts_of(choice.extra)
        content: list[dict[str, Any]] = []
        if thoughts and self.request.thoughts:
            shown = "" if self.request.omitted else thoughts
            content.append({"type": "thinking", "thinking": shown, "signature": SIGNATURE})
        if text.strip() or (text and not calls and not content):
            content.append({"type": "text", "text": text})
        content += [self._tool_use(call, choice.finish_reason) for call in calls]
        called = any(block["type"] == "tool_use" for block in content)
        ended = _ended(choice.finish_reason, choice.stop_reason, called=called)
        return self._message(content, self.answer.usage) | ended | speculation_member(self.answer.speculation)

    def chunks(self, delta: Delta) -> Iterator[Event]:
        """The events of one delta. The first is preceded by `message_start`; the last is followed by `message_stop`."""
        delta = self._readable(delta)
        if not self._begun:
            self._begun = True
            counted = Usage(prompt_tokens=len(delta.prompt.token_ids)) if delta.prompt else Usage()
            yield {"type": "message_start", "message": self._message([], counted)}
            yield {"type": "ping"}
        if self.request.thoughts and (thought := thoughts_of(delta.extra)):
            yield from self._write_thought(thought)
        if delta.text:
            yield from self._write_text(delta.text)
        pieces = delta.extra.get("tool_calls") or ()
        for position, piece in enumerate(pieces):
            numbered = {"index": position, **piece}
            self._calls.add([numbered])
            yield from self._write_call(numbered)
        if delta.finish_reason is not None:
            yield from self._end(delta)

    def _write_thought(self, thought: str) -> Iterator[Event]:
        if self._open is None or self._open.kind != "thinking":
            yield from self._write_waiting(ends=True)
            yield from self._begin("thinking", {"thinking": "", "signature": ""})
        if not self.request.omitted:
            yield self._delta({"type": "thinking_delta", "thinking": thought})

    def _write_text(self, text: str) -> Iterator[Event]:
        if self._open is None or self._open.kind != "text":
            self._blank += text
            if not self._blank.strip():
                return
            text, self._blank = self._blank, ""
            yield from self._write_waiting(ends=True)
            yield from self._begin("text", {"text": ""})
        yield self._delta({"type": "text_delta", "text": text})

    def _write_call(self, piece: Mapping[str, Any]) -> Iterator[Event]:
        """A piece of a tool call. No block can be opened again, so that a call waits until the one before is whole."""
        index = piece["index"]
        if self._open is None or self._open.call != index:
            if index < self._begun_calls:
                if (piece.get("function") or {}).get("arguments"):
                    raise UpstreamError("the upstream sent more of a tool call after its complete arguments")
                return
            if index in self._waiting or (self._open is not None and self._is_incomplete(self._open.call)):
                self._waiting.setdefault(index, []).append(piece)
                return
        yield from self._write_piece(piece, index)
        if self._waiting:
            yield from self._write_waiting()

    def _write_piece(self, piece: Mapping[str, Any], index: int) -> Iterator[Event]:
        function = piece.get("function") or {}
        if self._open is None or self._open.call != index:
            if not isinstance(function.get("name"), str):
                raise UpstreamError("the upstream sent a tool call without a name")
            self._begun_calls = index + 1
            head = {"id": _id_of(piece), "name": self._client_name(function["name"]), "input": {}}
            yield from self._begin("tool_use", head, call=index)
        if arguments := function.get("arguments"):
            yield self._delta({"type": "input_json_delta", "partial_json": str(arguments)})

    def _write_waiting(self, *, ends: bool = False) -> Iterator[Event]:
        """The calls that waited: up to one that may go on, or all where none can."""
        while self._waiting and (ends or not self._is_incomplete(self._open.call if self._open else None)):
            index = next(iter(self._waiting))
            for piece in self._waiting.pop(index):
                yield from self._write_piece(piece, index)

    def _is_incomplete(self, call: int | None) -> bool:
        """Whether more of the call must come: its arguments are no JSON object yet."""
        if call is None:
            return False
        written = self._calls.whole()[call]["function"].get("arguments") or ""
        return not written.rstrip().endswith("}") or whole_arguments(written, None) is None

    def _tool_use(self, call: Mapping[str, Any], finish: str | None) -> dict[str, Any]:
        """A whole tool call, or the text of one that must not run."""
        function = call.get("function") or {}
        name, arguments = self._client_name(function.get("name") or ""), function.get("arguments")
        if (input := whole_arguments(arguments, finish)) is None:
            return {"type": "text", "text": f"{name} {arguments or ''}"}
        return {"type": "tool_use", "id": _id_of(call), "name": name, "input": input}

    def _client_name(self, name: str) -> str:
        """The client's name of the tool that is called `name` in the chat."""
        key = self.request.names.key(name)
        return key[-1] if key else name

    def _begin(self, kind: str, head: dict[str, Any], call: int | None = None) -> Iterator[Event]:
        yield from self._close()
        self._blank = ""
        self._open = _OpenBlock(self._blocks, kind, call)
        self._blocks += 1
        yield {"type": "content_block_start", "index": self._open.index, "content_block": {"type": kind, **head}}

    def _delta(self, delta: dict[str, Any]) -> Event:
        assert self._open is not None
        return {"type": "content_block_delta", "index": self._open.index, "delta": delta}

    def _close(self) -> Iterator[Event]:
        if self._open is None:
            return
        if self._open.kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        yield {"type": "content_block_stop", "index": self._open.index}
        self._open = None

    def _end(self, delta: Delta) -> Iterator[Event]:
        yield from self._write_waiting(ends=True)
        if self._blank and not self._blocks:
            blank = self._blank
            yield from self._begin("text", {"text": ""})
            yield self._delta({"type": "text_delta", "text": blank})
        said = [call["function"].get("arguments") for call in self._calls.whole()]
        if said and not said[-1] and delta.finish_reason in CUT_OFF and self._open and self._open.kind == "tool_use":
            yield self._delta({"type": "input_json_delta", "partial_json": "{"})  # or it would read as a whole one
        yield from self._close()
        called = any(whole_arguments(arguments, delta.finish_reason) is not None for arguments in said)
        ended = _ended(delta.finish_reason, delta.stop_reason, called=called)
        usage, speculation = _usage(delta.usage or Usage()), speculation_member(delta.speculation)
        yield {"type": "message_delta", "delta": ended, "usage": usage, **speculation}
        yield {"type": "message_stop"}

    def _message(self, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }


def _id_of(call: Mapping[str, Any]) -> str:
    return str(call.get("id") or f"toolu_{uuid.uuid4().hex}")


def _ended(finish: str | None, stop: str | None, *, called: bool) -> dict[str, Any]:
    """Why the answer ended. For a named tool OpenAI's servers report "stop", for Anthropic's a call is a call."""
    if finish in ("stop", "tool_calls"):
        finish = "tool_calls" if called else "stop"
    if finish == "stop" and stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": _STOP_REASONS.get(finish or "", "end_turn"), "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, int]:
    """Anthropic counts tokens read from a cache apart from the others of the prompt."""
    return {
        "input_tokens": max(0, usage.prompt_tokens - usage.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
