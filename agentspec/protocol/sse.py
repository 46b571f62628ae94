"""Writes server-sent events, decodes them from bytes that may be cut anywhere, and passes them on unchanged.

Source: HTML Living Standard, section 9.2.6 "Interpreting an event stream". Only `data` matters to OpenAI's protocol;
comments and the other fields are skipped.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

from agentspec.errors import UpstreamError

MAX_EVENT_BYTES = 16 << 20  # the token ids of a long prompt come in one event
MAX_HELD = 1 << 20
DONE = b"data: [DONE]\n\n"
_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"|data:\s*\[DONE\]')
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def event(data: bytes) -> bytes:
    """The bytes of one event; `data` must be a single line, as encoded JSON is."""
    return b"data: " + data + b"\n\n"


class SseDecoder:
    """Takes bytes and yields the `data` of every event that they complete.

    Lines end in LF, CRLF or CR, bytes that never occur inside a UTF-8 sequence. An event is decoded only when complete,
    so a cut between any two bytes is harmless. An event that the stream's end cuts off is dropped, as the standard
    requires. Raises `UpstreamError` for an event above `max_event_bytes`, which also bounds the memory used.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self._line: list[bytes] = []
        self._data: list[bytes] = []
        self._held = 0
        self._after_cr = False
        self._first_line = True

    def feed(self, chunk: bytes) -> Iterator[str]:
        if self._after_cr and chunk:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        if not chunk:
            return
        self._after_cr = chunk.endswith(b"\r")
        for piece in chunk.splitlines(keepends=True):
            self._hold(piece)
            if piece.endswith((b"\n", b"\r")):
                yield from self._end_line()

    def _hold(self, piece: bytes) -> None:
        self._line.append(piece)
        self._held += len(piece)
        if self._held > self._max:
            raise UpstreamError(f"the upstream sent an event of more than {self._max} bytes")

    def _end_line(self) -> Iterator[str]:
        line = b"".join(self._line).rstrip(b"\r\n")
        self._line.clear()
        if self._first_line:
            line, self._first_line = line.removeprefix(_BYTE_ORDER_MARK), False
        if line:
            self._field(line)
            return
        if self._data:
            yield b"\n".join(self._data).decode("utf-8", "replace")
        self._data.clear()
        self._held = 0

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        else:
            self._held -= len(line)


class EventSplitter:
    """Cuts a byte stream after whole events and passes every byte on, looking only for counts and for the end.

    It holds back an incomplete event, up to `MAX_HELD` bytes, since no client can use it.
    """

    def __init__(self) -> None:
        self.finished = False
        self._counting: deque[bytes] = deque(maxlen=4)
        self._held = bytearray()
        self._cut_event = False

    def feed(self, piece: bytes) -> bytes:
        """The bytes to send now: all up to the end of the last whole event, or everything if too much is held."""
        searched = max(0, len(self._held) - 3)
        self._held += piece
        end = 0
        for match in _EVENT_END.finditer(self._held, searched):
            end = match.end()
        if end == 0 and len(self._held) > MAX_HELD:
            end, self._cut_event = len(self._held), True
        elif end:
            self._cut_event = False
        out = bytes(self._held[:end])
        del self._held[:end]
        self.finished = self.finished or _FINISHED.search(out) is not None
        if b'"usage"' in out or b'"speculation"' in out:
            self._counting.append(out)
        return out

    def counting_events(self) -> Iterator[str]:
        """The data of the events in the last few pieces that contained usage or speculation."""
        decoder = SseDecoder(max_event_bytes=2 * MAX_HELD)
        with suppress(UpstreamError):
            for piece in self._counting:
                yield from decoder.feed(piece)

    def rest(self) -> bytes:
        """The bytes still held after a complete stream: an upstream may omit the last blank line."""
        return bytes(self._held)

    def separator(self) -> bytes:
        """The blank line that ends an event of which a part was already sent; empty if there is none."""
        return b"\n\n" if self._cut_event else b""
