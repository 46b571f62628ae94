"""Writes an answer as the typed events of the Responses API; the whole answer is the response in the last of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agentspec.protocol.openai_responses.items import Item, input_of, new_id
from agentspec.protocol.openai_responses.request import ResponsesRequest
from agentspec.protocol.responses import ApiWriter, speculation_member, thoughts_of, usage_object
from agentspec.protocol.tools import whole_arguments
from agentspec.types import Delta, Speculation, Usage

Event = dict[str, Any]


@dataclass(slots=True)
class OutputItem:
    """One item of the output, at `index`. The model wrote `pieces` for it; `status` is None until it has ended."""

    prefix: ClassVar[str]
    kind: ClassVar[str]
    id: str = field(init=False)
    pieces: list[str] = field(default_factory=list, init=False)
    status: str | None = field(default=None, init=False)
    index: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.id = new_id(self.prefix)

    @property
    def written(self) -> str:
        return "".join(self.pieces)

    def begin(self) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "item": self.item("in_progress")}

    def add(self, text: str) -> Iterator[Event]:
        raise NotImplementedError

    def end(self) -> Iterator[Event]:
        raise NotImplementedError

    def item(self, status: str) -> Item:
        raise NotImplementedError


@dataclass(slots=True)
class MessageItem(OutputItem):
    """The text of an answer, an item of one part. `more` is what events about its text hold besides."""

    prefix = "msg"
    kind = "output_text"
    text: ClassVar[str] = "text"
    """The name of the text in the part and in the event at its end."""
    more: ClassVar[Event] = {"logprobs": []}
    annotations: list[Item] = field(default_factory=list, init=False)

    def begin(self) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "item": self.item("in_progress") | {"content": []}}
        yield {"type": "response.content_part.added", "content_index": 0, "part": self.part()}

    def add(self, text: str) -> Iterator[Event]:
        self.pieces.append(text)
        yield {"type": f"response.{self.kind}.delta", "content_index": 0, "delta": text, **self.more}

    def end(self) -> Iterator[Event]:
        yield {"type": f"response.{self.kind}.done", "content_index": 0, self.text: self.written, **self.more}
        yield {"type": "response.content_part.done", "content_index": 0, "part": self.part()}

    def annotate(self, annotation: Item) -> Iterator[Event]:
        """Add an annotation in the form of a chat: its members are in a member that is called as its type."""
        kind = annotation.get("type")
        inner = annotation.get(kind) if isinstance(kind, str) else None
        one = {"type": kind, **inner} if isinstance(inner, dict) else annotation
        self.annotations.append(one)
        at = len(self.annotations) - 1
        event = {"type": "response.output_text.annotation.added", "content_index": 0, "annotation_index": at}
        yield {**event, "annotation": one}

    def part(self) -> Item:
        noted = {"annotations": [*self.annotations]} if self.kind == "output_text" else {}
        return {"type": self.kind, self.text: self.written, **noted}

    def item(self, status: str) -> Item:
        head = {"id": self.id, "type": "message", "role": "assistant", "status": status}
        return {**head, "content": [self.part()]}


@dataclass(slots=True)
class RefusalItem(MessageItem):
    """What the model says instead of an answer that it refuses."""

    kind = "refusal"
    text = "refusal"
    more: ClassVar[Event] = {}


@dataclass(slots=True)
class ThoughtItem(MessageItem):
    """The model's thoughts, which come in full and not as a summary."""

    prefix = "rs"
    kind = "reasoning_text"
    more: ClassVar[Event] = {}

    def item(self, status: str) -> Item:
        return {"id": self.id, "type": "reasoning", "summary": [], "content": [self.part()], "status": status}


@dataclass(slots=True)
class CallItem(OutputItem):
    """A call of one of the client's functions."""

    prefix = "fc"
    kind = "function_call"
    call_id: str
    name: str
    namespace: str | None = None

    def add(self, text: str) -> Iterator[Event]:
        self.pieces.append(text)
        yield {"type": "response.function_call_arguments.delta", "delta": text}

    def end(self) -> Iterator[Event]:
        yield {"type": "response.function_call_arguments.done", "name": self.name, "arguments": self.written}

    def item(self, status: str) -> Item:
        named = {"namespace": self.namespace} if self.namespace else {}
        head = {"id": self.id, "type": self.kind, "status": status, "call_id": self.call_id, "name": self.name}
        return {**head, **named, **self.argument()}

    def argument(self) -> Item:
        return {"arguments": self.written}


@dataclass(slots=True)
class CustomCallItem(CallItem):
    """A call of one of the client's custom tools. Its input, a text inside of JSON, comes whole at the end."""

    prefix = "ctc"
    kind = "custom_tool_call"

    def add(self, text: str) -> Iterator[Event]:
        self.pieces.append(text)
        yield from ()

    def end(self) -> Iterator[Event]:
        if written := input_of(self.written):
            yield {"type": "response.custom_tool_call_input.delta", "delta": written}
        yield {"type": "response.custom_tool_call_input.done", "input": written}

    def argument(self) -> Item:
        return {"input": input_of(self.written)}


_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter", "cancelled": None}


@dataclass(slots=True)
class EventWriter(ApiWriter):
    """Writes the items of one answer one after the other. Calls stay open until the end, since pieces of several may
    come in any order.
    """

    named = True
    end = b""
    holds_answer = True
    request: ResponsesRequest
    id: str = field(default_factory=lambda: new_id("resp"))
    created: int = field(default_factory=lambda: int(time.time()))
    _items: list[OutputItem] = field(default_factory=list)
    _text: MessageItem | None = None  # the item that further text continues
    _notes: list[Item] = field(default_factory=list)
    _calls: dict[int, CallItem] = field(default_factory=dict)
    _finish: str | None = None
    _usage: Usage | None = None
    _speculation: Speculation | None = None
    _number: int = 0
    _completed: int | None = None

    def add(self, delta: Delta) -> None:
        for _ in self.chunks(delta):
            pass

    def chunks(self, delta: Delta) -> Iterator[Event]:
        """The events of one delta; those of other choices than the first are none."""
        if self._number == 0:
            yield self._event({"type": "response.created", "response": self._response("in_progress")})
            yield self._event({"type": "response.in_progress", "response": self._response("in_progress")})
        self._usage = delta.usage or self._usage
        self._speculation = delta.speculation or self._speculation
        self._finish = delta.finish_reason or self._finish
        if thought := thoughts_of(delta.extra):
            yield from self._write_text(ThoughtItem, thought)
        goes_on = type(self._text) is MessageItem or not self._calls  # blanks between calls are no message
        if delta.text and (goes_on or delta.text.strip()):
            yield from self._write_text(MessageItem, delta.text)
        if isinstance(refusal := delta.extra.get("refusal"), str) and refusal:
            yield from self._write_text(RefusalItem, refusal)
        self._notes += [one for one in delta.extra.get("annotations") or () if isinstance(one, dict)]
        yield from self._write_notes()
        for position, piece in enumerate(delta.extra.get("tool_calls") or ()):
            yield from self._write_call(piece, position)

    def close(self) -> Iterator[Event]:
        """The events that end the items. An answer without any has one empty message."""
        if not self._items or self._notes:
            yield from self._open_text(MessageItem())
            yield from self._write_notes()
        status = self.status
        self._completed = int(time.time()) if status == "completed" else None
        for item in self._items:
            must_not_run = isinstance(item, CallItem) and whole_arguments(item.written, self._finish) is None
            ended = status if item is self._items[-1] else "completed"
            yield from self._end(item, "incomplete" if must_not_run else ended)

    def last(self) -> Iterator[Event]:
        yield self._event({"type": f"response.{self.status}", "response": self._response(self.status)})

    def failed(self, error: dict[str, Any], status: int, request_id: str) -> Event:
        code = "invalid_prompt" if status < 500 else "server_error"
        code = "rate_limit_exceeded" if status == 429 else code
        response = self._response("failed") | {"error": {"code": code, "message": error["message"]}}
        return self._event({"type": "response.failed", "response": response})

    @property
    def status(self) -> str:
        return "incomplete" if self._finish in _INCOMPLETE else "completed"

    def body(self) -> dict[str, Any]:
        return self._response(self.status)

    def own_name(self, param: str) -> str:
        return self.request.own_name(param)

    def _write_text(self, kind: type[MessageItem], text: str) -> Iterator[Event]:
        if type(self._text) is not kind:
            yield from self._open_text(kind())
        assert self._text is not None
        yield from self._about(self._text, self._text.add(text))

    def _write_notes(self) -> Iterator[Event]:
        """The annotations, which wait for the text that they are about: some upstreams send them before it."""
        while self._notes and type(self._text) is MessageItem:
            yield from self._about(self._text, self._text.annotate(self._notes.pop(0)))

    def _write_call(self, piece: Mapping[str, Any], position: int) -> Iterator[Event]:
        index, function = piece.get("index", position), piece.get("function") or {}
        call = self._calls.get(index)
        if call is None:
            yield from self._end_text()
            call = self._call_item(str(piece.get("id") or new_id("call")), str(function.get("name") or ""))
            self._calls[index] = call
            yield from self._open(call)
        if arguments := function.get("arguments"):
            yield from self._about(call, call.add(str(arguments)))

    def _call_item(self, id: str, chat_name: str) -> CallItem:
        """A call by the name that the tool has in the chat."""
        key = self.request.names.key(chat_name)
        if key is None:
            return CallItem(id, chat_name)
        tool = next((one for one in self.request.tools if one.key == key), None)
        if tool is None:  # one that the conversation speaks of, and the request does not offer
            return CallItem(id, key[1], key[0] or None)
        return (CustomCallItem if tool.kind == "custom" else CallItem)(id, tool.name, tool.namespace)

    def _open_text(self, item: MessageItem) -> Iterator[Event]:
        yield from self._end_text()
        yield from self._open(item)
        self._text = item

    def _open(self, item: OutputItem) -> Iterator[Event]:
        item.index = len(self._items)
        self._items.append(item)
        yield from self._about(item, item.begin())

    def _end_text(self) -> Iterator[Event]:
        if self._text is not None:
            yield from self._end(self._text, "completed")
            self._text = None

    def _end(self, item: OutputItem, status: str) -> Iterator[Event]:
        if item.status is None:
            yield from self._about(item, item.end())
            item.status = status
            yield from self._about(item, iter([{"type": "response.output_item.done", "item": item.item(status)}]))

    def _about(self, item: OutputItem, events: Iterator[Event]) -> Iterator[Event]:
        """The events with the place of their item in the output."""
        for event in events:
            named = {} if "item" in event else {"item_id": item.id}
            yield self._event({**event, "output_index": item.index, **named})

    def _event(self, event: Event) -> Event:
        self._number += 1
        return {**event, "sequence_number": self._number - 1}

    def _response(self, status: str) -> dict[str, Any]:
        ended = status != "in_progress"
        output = [item.item(item.status or "incomplete") for item in self._items]
        reason = _INCOMPLETE.get(self._finish or "") if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "completed_at": self._completed if status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": reason} if reason else None,
            **self.request.fields,
            "output": output if ended else [],
            "service_tier": "default",
            "store": self.stored,
            "usage": responses_usage(self._usage) if ended and self._usage else None,
            **speculation_member(self._speculation if ended else None),
        }


def responses_usage(usage: Usage) -> dict[str, Any]:
    """The `usage` object of a response: that of a chat, in other words."""
    chat = usage_object(usage)
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {**chat["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0, **chat.get("completion_tokens_details", {})},
        "total_tokens": chat["total_tokens"],
    }
