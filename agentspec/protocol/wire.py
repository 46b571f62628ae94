"""JSON and server-sent events as bytes: writes them, decodes events that may be cut anywhere, and passes them on.

Source: HTML Living Standard, section 9.2.6 "Interpreting an event stream". Only `data` matters to OpenAI's protocol;
comments and the other fields are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from agentspec.errors import UpstreamError

MAX_EVENT_BYTES = 16 << 20  # the token ids of a long prompt come in one event
MAX_HELD = 3 << 18  # of an event that is passed on; with the copy that is sent, less than 2 MiB
DONE = b"data: [DONE]\n\n"
_ENDS = (b"\n\n", b"\n\r", b"\r\r")  # the end of a line and a blank line: CRLF CRLF holds LF CR
_USUAL_ENDS = (b"\n\n", b"\r\n\r\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def encode(value: Any) -> bytes:
    """Compact JSON in UTF-8; a lone surrogate, which UTF-8 cannot encode, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


def loads(text: str | bytes, *, strict: bool = True) -> Any:
    """The value of a JSON text. Raises `ValueError`, also for one that is nested too deeply to be read."""
    try:
        return json.loads(text, strict=strict)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def object_in(text: str | bytes) -> dict[str, Any]:
    """The JSON object that `text` is; an empty one for anything else."""
    try:
        value = loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def reported(value: Mapping[str, Any]) -> Any:
    """The error that a chunk or an answer reports, if any: as OpenAI's, or in the form that vLLM once had."""
    return value if value.get("object") == "error" else value.get("error")


def event(data: bytes) -> bytes:
    """The bytes of one event; `data` must be a single line, as encoded JSON is."""
    return b"data: " + data + b"\n\n"


def named_event(name: str, data: bytes) -> bytes:
    """The bytes of an event that has a name, for clients that distinguish events by it."""
    return b"event: " + name.encode() + b"\n" + event(data)


class SseDecoder:
    """Takes bytes and yields the `data` of every event that they complete.

    Lines end in LF, CRLF or CR, bytes that never occur inside a UTF-8 sequence. An event is decoded only when complete,
    so a cut between any two bytes is harmless. Without `finish` an event that the stream's end cuts off is dropped, as
    the standard requires. Raises `UpstreamError` for an event above `max_event_bytes`, which also bounds the memory
    used.
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

    def finish(self) -> Iterator[str]:
        """The event that lacks its blank line when the body has ended in order, as some servers end their last one."""
        return self.feed(b"\n\n")

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
    """Cuts a byte stream after whole events, and passes every byte on. A piece that ends with an event is not copied.

    It holds back an incomplete event, up to `MAX_HELD` bytes, since no client can use it; the rest of a longer event
    passes as it comes.
    """

    def __init__(self) -> None:
        self.whole_from = 0
        self._held = bytearray()
        self._inside = False

    def feed(self, piece: bytes) -> bytes:
        """The bytes to send now: all up to the end of the last whole event, or everything if too much is held.

        Whole events begin at the index `whole_from` of them; the bytes before it end an event that was too long.
        """
        self.whole_from = 0
        if not self._held and not self._inside and piece.endswith(_USUAL_ENDS):
            return piece
        searched = max(0, len(self._held) - 1)  # the two bytes of an end may come in two pieces
        self._held += piece
        end = _last_end(self._held, searched)
        if self._inside:
            self.whole_from = _first_end(self._held) if end else len(self._held)
        if end:
            self._inside = False
        elif self._inside or len(self._held) > MAX_HELD:
            self._inside = True
            end = len(self._held) - self._held.endswith((b"\n", b"\r"))
        with memoryview(self._held) as held, held[:end] as whole:
            out = bytes(whole)
        del self._held[:end]
        return out

    def rest(self) -> bytes:
        """The bytes still held after a complete stream: an upstream may omit the last blank line."""
        return bytes(self._held)

    def separator(self) -> bytes:
        """The blank line that ends an event of which a part was already sent; empty if there is none."""
        return b"\n\n" if self._inside else b""


def _last_end(data: bytearray, start: int) -> int:
    """Where the last whole event of `data` ends; 0 if none ends after `start`."""
    return max(_behind(data, data.rfind(end, start)) for end in _ENDS)


def _first_end(data: bytearray) -> int:
    return min(_behind(data, found) for end in _ENDS if (found := data.find(end)) >= 0)


def _behind(data: bytearray, found: int) -> int:
    """The index after the blank line that begins at `found`; 0 for -1. CRLF is one end of a line."""
    if found < 0:
        return 0
    return found + 3 if data[found + 1 : found + 3] == b"\r\n" else found + 2
