"""The items of an answer while they are written, each with the events that tell of it.

`begin` has the events before an item's first text, `end` those after its last, and `item` is the item as it is now. The
events lack the sequence number and the item's place, which `EventWriter` adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentspec.protocol.openai_responses.items import Item, new_id
from agentspec.protocol.openai_responses.tool_input import InputReader
from agentspec.protocol.responses import clamped
from agentspec.types import TokenLogprob

Event = dict[str, Any]


@dataclass(slots=True)
class MessageItem:
    """The text of an answer."""

    logprobs: bool = False
    id: str = field(default_factory=lambda: new_id("msg"))
    text: list[str] = field(default_factory=list)
    tokens: list[TokenLogprob] = field(default_factory=list)

    def begin(self) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "item": self.item("in_progress") | {"content": []}}
        yield {"type": "response.content_part.added", "content_index": 0, "part": self._part()}

    def add(self, text: str, tokens: Sequence[TokenLogprob]) -> Iterator[Event]:
        self.text.append(text)
        self.tokens.extend(tokens)
        logprobs = [_logprob(token, encoded=False) for token in tokens]
        yield {"type": "response.output_text.delta", "content_index": 0, "delta": text, "logprobs": logprobs}

    def end(self, status: str) -> Iterator[Event]:
        logprobs = [_logprob(token, encoded=False) for token in self.tokens]
        whole = {"text": "".join(self.text), "logprobs": logprobs}
        yield {"type": "response.output_text.done", "content_index": 0, **whole}
        yield {"type": "response.content_part.done", "content_index": 0, "part": self._part()}

    def item(self, status: str) -> Item:
        head = {"id": self.id, "type": "message", "role": "assistant", "status": status}
        return {**head, "content": [self._part()]}

    def _part(self) -> Item:
        part: Item = {"type": "output_text", "text": "".join(self.text), "annotations": []}
        return part | ({"logprobs": [_logprob(token, encoded=True) for token in self.tokens]} if self.logprobs else {})


@dataclass(slots=True)
class ThoughtItem:
    """The model's thoughts, which come in full and not as a summary."""

    id: str = field(default_factory=lambda: new_id("rs"))
    text: list[str] = field(default_factory=list)

    def begin(self) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "item": self.item("in_progress") | {"content": []}}
        yield {"type": "response.content_part.added", "content_index": 0, "part": self._part()}

    def add(self, text: str) -> Iterator[Event]:
        self.text.append(text)
        yield {"type": "response.reasoning_text.delta", "content_index": 0, "delta": text}

    def end(self, status: str) -> Iterator[Event]:
        yield {"type": "response.reasoning_text.done", "content_index": 0, "text": "".join(self.text)}
        yield {"type": "response.content_part.done", "content_index": 0, "part": self._part()}

    def item(self, status: str) -> Item:
        return {"id": self.id, "type": "reasoning", "summary": [], "content": [self._part()], "status": status}

    def _part(self) -> Item:
        return {"type": "reasoning_text", "text": "".join(self.text)}


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
    """A call of one of the client's custom tools, whose input is text."""

    id: str = field(default_factory=lambda: new_id("ctc"))
    _reader: InputReader = field(default_factory=InputReader)

    def add(self, arguments: str) -> Iterator[Event]:
        yield from self._add(self._reader.feed(arguments))

    def end(self, status: str) -> Iterator[Event]:
        yield from self._add(self._reader.finish())
        yield {"type": "response.custom_tool_call_input.done", "input": "".join(self.text)}

    def item(self, status: str) -> Item:
        return self._item("custom_tool_call", status, "input")

    def _add(self, text: str) -> Iterator[Event]:
        if text:
            self.text.append(text)
            yield {"type": "response.custom_tool_call_input.delta", "delta": text}


OutputItem = MessageItem | ThoughtItem | CallItem


def _logprob(token: TokenLogprob, *, encoded: bool) -> Item:
    """A token with its alternatives; whole answers have the bytes of each (`encoded`), events have not."""
    return {**_entry(token, encoded), "top_logprobs": [_entry(top, encoded) for top in token.top]}


def _entry(token: TokenLogprob, encoded: bool) -> Item:
    entry: Item = {"token": token.text, "logprob": clamped(token.logprob)}
    return entry | ({"bytes": list(token.text.encode("utf-8", "replace"))} if encoded else {})
