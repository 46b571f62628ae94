"""Reads from an upstream's answer what the gateway must know: whether it is whole, its counts, a reported error.

Answers are not parsed for that. Only events that can tell something are, and they are found by a search for names.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

from agentspec.backends.base import COMPLETIONS
from agentspec.errors import UpstreamError
from agentspec.protocol.deltas import read_speculation, read_usage
from agentspec.protocol.errors import reported
from agentspec.protocol.wire import MAX_HELD, SseDecoder, object_in
from agentspec.proxy.errors import anthropic_error_event, error_event
from agentspec.types import Delta, Speculation, Usage

PARSED_BYTES = 64 << 10
"""A whole answer up to this size is parsed; in a longer one the counts are looked for among its last members."""
TAIL_BYTES = 256 << 10
# A field of these names that is not null. The text of an answer is JSON too: its quotes are escaped and match nothing.
_NAMES = rb'"(?:finish_reason|usage|speculation|error)"\s*:\s*[^n\s]|"object"\s*:\s*"error"'
_TELLING = re.compile(_NAMES)
_TELLING_TEXT = re.compile(_NAMES.decode())
_COUNTS = ("usage", "speculation")


def expected_choices(path: str, fields: Mapping[str, Any]) -> int:
    """How many choices the answer to a request with these `fields` has: `n` for each prompt."""
    n, prompt = fields.get("n"), fields.get("prompt")
    prompts = 1
    if path == COMPLETIONS and isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        prompts = len(prompt)
    return prompts * (n if isinstance(n, int) and n > 1 else 1)


class Inspector(ABC):
    """Follows a stream that is passed on.

    `done`: the upstream said that the stream is complete. `error`: what it reported in place of the rest, if it did.
    """

    def __init__(self) -> None:
        self.done = False
        self.error: Any = None

    @property
    def finished(self) -> bool:
        """Whether nothing is missing if the stream ends here."""
        return self.done or self.error is not None

    @property
    @abstractmethod
    def counts(self) -> Delta: ...

    @abstractmethod
    def read(self, events: bytes) -> None:
        """Look at the next whole events."""

    @abstractmethod
    def failure(self, error: Exception, request_id: str) -> bytes:
        """The event that tells the client of an `error` that broke the stream off."""


class EventInspector(Inspector):
    """Follows a stream whose events are JSON objects. Only those that `telling` matches are parsed: text of an answer
    is JSON too, but its quotes are escaped and match nothing.
    """

    telling: ClassVar[re.Pattern[bytes]]

    def read(self, events: bytes) -> None:
        if self.telling.search(events) is None:
            return
        with suppress(UpstreamError):
            for data in SseDecoder(max_event_bytes=2 * MAX_HELD).feed(events):
                self.read_event(object_in(data))

    @abstractmethod
    def read_event(self, event: Mapping[str, Any]) -> None:
        """Take the counts, an error or the end from one of these events."""


class MessagesInspector(EventInspector):
    """Follows a stream of the Messages API, which `message_stop` ends; `message_delta` has the counts so far."""

    telling = re.compile(rb'"(?:message_start|message_delta|message_stop|error)"')

    def __init__(self) -> None:
        super().__init__()
        self._usage: dict[str, Any] = {}

    def failure(self, error: Exception, request_id: str) -> bytes:
        return anthropic_error_event(error, request_id)

    @property
    def counts(self) -> Delta:
        return read_counts({"usage": self._usage})

    def read_event(self, event: Mapping[str, Any]) -> None:
        kind, message = event.get("type"), event.get("message")
        self.done = self.done or kind == "message_stop"
        if kind == "error":
            self.error = self.error or event.get("error") or kind
        usage = event.get("usage") if kind == "message_delta" else isinstance(message, dict) and message.get("usage")
        if isinstance(usage, dict):
            self._usage |= {name: count for name, count in usage.items() if count is not None}


class StreamInspector(Inspector):
    """Follows a stream of chunks whose answer has `choices` choices; it is whole once each has its finish reason."""

    def __init__(self, choices: int) -> None:
        super().__init__()
        self._choices = choices
        self._finished: set[int] = set()
        self._counts: dict[str, Any] = {}

    def failure(self, error: Exception, request_id: str) -> bytes:
        return error_event(error, request_id)

    @property
    def finished(self) -> bool:
        return super().finished or len(self._finished) >= self._choices

    @property
    def counts(self) -> Delta:
        return read_counts(self._counts)

    def read(self, events: bytes) -> None:
        if b"[DONE]" not in events and _TELLING.search(events) is None:  # one pattern for both takes twice as long
            return
        with suppress(UpstreamError):
            for data in SseDecoder(max_event_bytes=2 * MAX_HELD).feed(events):
                if data.strip() == "[DONE]":
                    self.done = True
                elif _TELLING_TEXT.search(data) is not None:
                    self._read_chunk(data)

    def _read_chunk(self, data: str) -> None:
        chunk = object_in(data)
        self.error = self.error or reported(chunk)
        self._counts |= {name: chunk[name] for name in _COUNTS if chunk.get(name)}
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and choice.get("finish_reason"):
                index = choice.get("index")
                self._finished.add(index if isinstance(index, int) else 0)


def read_answer(content: bytes) -> tuple[Delta, Any]:
    """The counts of a whole answer, and the error that it reports, if any. What cannot be read is left out."""
    if len(content) <= PARSED_BYTES:
        answer = object_in(content)
        return read_counts(answer), reported(answer)
    return read_counts(_last_members(content)), None


def _last_members(content: bytes) -> dict[str, Any]:
    """The top-level members of a long answer from the first of its counts on, if they are at its end."""
    tail = content[-TAIL_BYTES:]
    for name in _COUNTS:
        start = tail.rfind(b'"%s"' % name.encode())
        if start >= 0 and (members := object_in(b"{" + tail[start:])):
            return members
    return {}


def read_counts(counts: Mapping[str, Any]) -> Delta:
    """The `usage` and the `speculation` in an answer, each left out if it cannot be read."""
    usage: Usage | None = None
    speculation: Speculation | None = None
    with suppress(AttributeError, TypeError, ValueError, OverflowError):
        usage = read_usage(given) if (given := counts.get("usage")) else None
    with suppress(AttributeError, TypeError, ValueError, OverflowError):
        speculation = read_speculation(given) if (given := counts.get("speculation")) else None
    return Delta(usage=usage, speculation=speculation)
