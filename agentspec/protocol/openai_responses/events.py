"""Writes an answer as the typed events of the Responses API; the whole answer is the response in the last of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agentspec.protocol.openai_responses.items import Item, new_id
from agentspec.protocol.openai_responses.request import ResponsesRequest
from agentspec.protocol.openai_responses.tools import input_of
from agentspec.protocol.responses import ToolCalls, speculation_object, whole_arguments
from agentspec.types import Delta, Speculation, Usage

Event = dict[str, Any]


@dataclass(slots=True)
class _TextItem:
    """An item of one part with text, which its events call by `kind`; `more` is what they tell besides."""

    kind: ClassVar[str]
    more: ClassVar[Event] = {}
    id: str
    text: list[str] = field(default_factory=list)

    def begin(self) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "item": self.item("in_progress") | {"content": []}}
        yield {"type": "response.content_part.added", "content_index": 0, "part": self.part()}

    def add(self, text: str) -> Iterator[Event]:
        self.text.append(text)
        yield {"type": f"response.{self.kind}.delta", "content_index": 0, "delta": text, **self.more}

    def end(self, status: str) -> Iterator[Event]:
        whole = {"text": "".join(self.text), **self.more}
        yield {"type": f"response.{self.kind}.done", "content_index": 0, **whole}
        yield {"type": "response.content_part.done", "content_index": 0, "part": self.part()}

    def item(self, status: str) -> Item:
        raise NotImplementedError

    def part(self) -> Item:
        return {"type": self.kind, "text": "".join(self.text)}


@dataclass(slots=True)
class MessageItem(_TextItem):
    """The text of an answer."""

    kind: ClassVar[str] = "output_text"
    more: ClassVar[Event] = {"logprobs": []}
    id: str = field(default_factory=lambda: new_id("msg"))

    def item(self, status: str) -> Item:
        head = {"id": self.id, "type": "message", "role": "assistant", "status": status}
        return {**head, "content": [self.part()]}

    def part(self) -> Item:
        return {"type": self.kind, "text": "".join(self.text), "annotations": []}


@dataclass(slots=True)
class ThoughtItem(_TextItem):
    """The model's thoughts, which come in full and not as a summary."""

    kind: ClassVar[str] = "reasoning_text"
    id: str = field(default_factory=lambda: new_id("rs"))

    def item(self, status: str) -> Item:
        return {"id": self.id, "type": "reasoning", "summary": [], "content": [self.part()], "status": status}


@dataclass(slots=True)
class CallItem:
    """A call of one of the client's functions."""

    call_id: str
    name: str
    namespace: str | None = None
    id: str = field(default_factory=lambda: new_id("fc"))
    text: list[str] = field(default_factory=list)  # its arguments

    def begin(self) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "item": self.item("in_progress")}

    def add(self, arguments: str) -> Iterator[Event]:
        self.text.append(arguments)
        yield {"type": "response.function_call_arguments.delta", "delta": arguments}

    def end(self, status: str) -> Iterator[Event]:
        whole = {"name": self.name, "arguments": "".join(self.text)}
        yield {"type": "response.function_call_arguments.done", **whole}

    def item(self, status: str) -> Item:
        return self._item("function_call", status, "arguments")

    def _item(self, kind: str, status: str, member: str) -> Item:
        named = {"namespace": self.namespace} if self.namespace else {}
        head = {"id": self.id, "type": kind, "status": status, "call_id": self.call_id, "name": self.name}
        return {**head, **named, member: "".join(self.text)}


@dataclass(slots=True)
class CustomCallItem(CallItem):
    """A call of one of the client's custom tools. Its input, a text inside of JSON, comes whole at the end."""

    id: str = field(default_factory=lambda: new_id("ctc"))
    _arguments: list[str] = field(default_factory=list)

    def add(self, arguments: str) -> Iterator[Event]:
        self._arguments.append(arguments)
        yield from ()

    def end(self, status: str) -> Iterator[Event]:
        written = input_of("".join(self._arguments))
        self.text.append(written)
        if written:
            yield {"type": "response.custom_tool_call_input.delta", "delta": written}
        yield {"type": "response.custom_tool_call_input.done", "input": written}

    def item(self, status: str) -> Item:
        return self._item("custom_tool_call", status, "input")


OutputItem = MessageItem | ThoughtItem | CallItem


_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter", "cancelled": None}


@dataclass(slots=True)
class EventWriter:
    """Writes one answer: `begin`, `write` for each delta, `close` after the last, then `last` or `fail`.

    Items are written one after the other. Calls stay open until the end, since pieces of several may come in any order.
    """

    request: ResponsesRequest
    stored: bool = False
    id: str = field(default_factory=lambda: new_id("resp"))
    created: int = field(default_factory=lambda: int(time.time()))
    _items: list[OutputItem] = field(default_factory=list)
    _places: dict[str, int] = field(default_factory=dict)  # item id -> its place in the output
    _ended: dict[str, str] = field(default_factory=dict)  # item id -> its final status
    _text: MessageItem | ThoughtItem | None = None  # the item that further text continues
    _calls: dict[int, CallItem] = field(default_factory=dict)
    _said: ToolCalls = field(default_factory=ToolCalls)  # the calls as they came
    _finish: str | None = None
    _usage: Usage | None = None
    _speculation: Speculation | None = None
    _number: int = 0
    _completed: int | None = None

    def begin(self) -> Iterator[Event]:
        yield self._event({"type": "response.created", "response": self._response("in_progress")})
        yield self._event({"type": "response.in_progress", "response": self._response("in_progress")})

    def write(self, delta: Delta) -> Iterator[Event]:
        """The events of one delta; those of other choices than the first are none."""
        self._usage = delta.usage or self._usage
        self._speculation = delta.speculation or self._speculation
        self._finish = delta.finish_reason or self._finish
        thought = delta.extra.get("reasoning") or delta.extra.get("reasoning_content")
        calls = delta.extra.get("tool_calls") or ()
        if isinstance(thought, str) and thought:
            yield from self._write_thought(thought)
        if delta.text:
            yield from self._write_text(delta.text)
        self._said.add(calls)
        for position, piece in enumerate(calls):
            yield from self._write_call(piece, position)

    def close(self) -> Iterator[Event]:
        """The events that end the items. An answer without any has one empty message."""
        if not self._items:
            yield from self._next(MessageItem())
        status = self.status
        self._completed = int(time.time()) if status == "completed" else None
        last = self._items[-1]
        broken = self._broken()
        for item in self._items:
            yield from self._end(item, "incomplete" if item.id in broken else status if item is last else "completed")

    def last(self) -> Event:
        """The event that ends the answer."""
        status = self.status
        return self._event({"type": f"response.{status}", "response": self._response(status)})

    def fail(self, code: str, message: str) -> Event:
        """The event that ends an answer that an error broke off."""
        response = self._response("failed") | {"error": {"code": code, "message": message}}
        return self._event({"type": "response.failed", "response": response})

    @property
    def status(self) -> str:
        return "incomplete" if self._finish in _INCOMPLETE else "completed"

    @property
    def response(self) -> dict[str, Any]:
        """The whole answer."""
        return self._response(self.status)

    def _write_thought(self, text: str) -> Iterator[Event]:
        item = self._text
        if not isinstance(item, ThoughtItem):
            yield from self._next(item := ThoughtItem())
        yield from self._place(item, item.add(text))

    def _write_text(self, text: str) -> Iterator[Event]:
        item = self._text
        if not isinstance(item, MessageItem):
            if not text.strip() and self._calls:
                return  # blanks between calls are no message
            yield from self._next(item := MessageItem())
        yield from self._place(item, item.add(text))

    def _write_call(self, piece: Mapping[str, Any], position: int) -> Iterator[Event]:
        index, function = piece.get("index", position), piece.get("function") or {}
        call = self._calls.get(index)
        if call is None:
            yield from self._end_text()
            call = self._called(str(piece.get("id") or new_id("call")), str(function.get("name") or ""))
            self._calls[index] = call
            yield from self._open(call)
        if arguments := function.get("arguments"):
            yield from self._place(call, call.add(str(arguments)))

    def _broken(self) -> set[str]:
        """The items of calls that must not run."""
        calls = zip(self._calls.values(), self._said.whole(), strict=False)
        said = ((item.id, call["function"].get("arguments")) for item, call in calls)
        return {id for id, arguments in said if whole_arguments(arguments, self._finish) is None}

    def _called(self, id: str, chat_name: str) -> CallItem:
        """A call by the name that the tool has in the chat."""
        key = self.request.names.key(chat_name)
        if key is None:
            return CallItem(id, chat_name)
        tool = next((one for one in self.request.tools if one.key == key), None)
        if tool is None:  # one that the conversation speaks of, and the request does not offer
            return CallItem(id, key[1], key[0] or None)
        return (CustomCallItem if tool.kind == "custom" else CallItem)(id, tool.name, tool.namespace)

    def _next(self, item: MessageItem | ThoughtItem) -> Iterator[Event]:
        yield from self._end_text()
        yield from self._open(item)
        self._text = item

    def _open(self, item: OutputItem) -> Iterator[Event]:
        self._places[item.id] = len(self._items)
        self._items.append(item)
        yield from self._place(item, item.begin())

    def _end_text(self) -> Iterator[Event]:
        if self._text is not None:
            yield from self._end(self._text, "completed")
            self._text = None

    def _end(self, item: OutputItem, status: str) -> Iterator[Event]:
        if item.id in self._ended:
            return
        yield from self._place(item, item.end(status))
        self._ended[item.id] = status
        yield from self._place(item, iter([{"type": "response.output_item.done", "item": item.item(status)}]))

    def _place(self, item: OutputItem, events: Iterator[Event]) -> Iterator[Event]:
        """The events with the place of their item."""
        place: Event = {"output_index": self._places[item.id]}
        for event in events:
            named = {} if "item" in event else {"item_id": item.id}
            yield self._event({**event, **place, **named})

    def _event(self, event: Event) -> Event:
        self._number += 1
        return {**event, "sequence_number": self._number - 1}

    def _output(self) -> list[Item]:
        return [item.item(self._ended.get(item.id, "incomplete")) for item in self._items]

    def _response(self, status: str) -> dict[str, Any]:
        ended = status != "in_progress"
        reason = _INCOMPLETE.get(self._finish or "") if status == "incomplete" else None
        done = self._speculation if ended else None
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
            "output": self._output() if ended else [],
            "service_tier": "default",
            "store": self.stored,
            "usage": responses_usage(self._usage) if ended and self._usage else None,
            **({"speculation": speculation_object(done)} if done else {}),
        }


def responses_usage(usage: Usage) -> dict[str, Any]:
    """The `usage` object of a response. It has prediction counts only if the request carried a prediction.

    No tokens are said to be written to a cache: nobody is charged for that.
    """
    accepted, rejected = usage.accepted_prediction_tokens, usage.rejected_prediction_tokens
    predicted = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens or 0,
            **({} if accepted is None else predicted),
        },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
