"""Server-sent events, decoded from bytes that may be cut anywhere.

Source: HTML Living Standard, section 9.2.6 "Interpreting an event stream". Only `data` matters to OpenAI's protocol;
comments and the other fields are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

from agentspec.errors import UpstreamError

MAX_EVENT_BYTES = 16 << 20  # the token ids of a long prompt come in one event
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseDecoder:
    """Feed it bytes, take the `data` of every event that became complete.

    Lines end in LF, CRLF or CR. Splitting is done on bytes, where those never occur inside a UTF-8 sequence, and an
    event is decoded only once whole, so a cut between any two bytes is harmless. An event that the stream's end cuts
    off is dropped, as the standard asks. Raises `UpstreamError` for an event above `max_event_bytes`, which also
    bounds the memory held.
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
