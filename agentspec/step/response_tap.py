"""Reads usage and speculation from an HTTP response while its client reads it, without delaying or changing a byte.

Works with httpx and httpx2. It finds their stream classes by name, so it imports neither library.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from typing import Any

from agentspec.errors import UpstreamError
from agentspec.protocol.sse import SseDecoder
from agentspec.protocol.usage import numbers_of, read_speculation, read_usage
from agentspec.types import Speculation, Usage

MAX_KEPT = 16 << 20  # bytes of a JSON body, or of one event, kept for parsing; a longer one is passed on unread
_NOTHING = asdict(Speculation())


class ResponseTap:
    """Takes a raw body piece by piece, and finds `usage` and `speculation` in a JSON body or in the events of a stream.

    A body that is not JSON, or has another encoding than gzip or deflate, is not read: both counts stay None.
    """

    def __init__(self, content_type: str, encoding: str = "") -> None:
        self._decoder = SseDecoder(MAX_KEPT) if content_type.startswith("text/event-stream") else None
        self._unzip = zlib.decompressobj(wbits=47) if encoding in ("gzip", "deflate") else None
        self._body = bytearray()
        self._unreadable = self._unzip is None and encoding not in ("", "identity")
        self._found: dict[str, Any] = {}

    def feed(self, data: bytes) -> None:
        """Read the next piece of the body, which may be cut anywhere."""
        if self._unreadable:
            return
        try:
            self._read(data if self._unzip is None else self._unzip.decompress(data))
        except (zlib.error, UpstreamError):
            self._unreadable = True

    def finish(self) -> tuple[Usage | None, Speculation | None]:
        """The counts found, once the body has ended or was cut off."""
        if not self._unreadable and self._decoder is not None:
            with suppress(UpstreamError):
                self._read_events(self._decoder.finish())  # also of a stream that was cut off
        elif not self._unreadable:
            self._read_object(self._body)
        return _usage_of(self._found.get("usage")), _speculation_of(self._found.get("speculation"))

    def _read(self, data: bytes) -> None:
        if self._decoder is None:
            self._body += data
            self._unreadable = len(self._body) > MAX_KEPT
            return
        self._read_events(self._decoder.feed(data))

    def _read_events(self, events: Iterator[str]) -> None:
        for event in events:
            if '"usage"' in event or '"speculation"' in event:
                self._read_object(event)

    def _read_object(self, data: str | bytes | bytearray) -> None:
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            return
        if not isinstance(body, dict):
            return
        # Events of the Responses API wrap the answer, and the first one of the Messages API does.
        for part in (body, body.get("response"), body.get("message")):
            if isinstance(part, dict):
                self._take_counts(part)

    def _take_counts(self, part: dict[str, Any]) -> None:
        for key in ("usage", "speculation"):
            if isinstance(told := part.get(key), dict) and told:
                known = self._found.setdefault(key, {})  # later counts need not repeat those of the prompt
                known.update((name, count) for name, count in told.items() if count is not None)


def _usage_of(value: Any) -> Usage | None:
    """Read a `usage` object and ignore values that are no numbers, since reading must not break the answer."""
    return read_usage(numbers_of(value)) if isinstance(value, Mapping) else None


def _speculation_of(value: Any) -> Speculation | None:
    """Read the counts of a gateway's `speculation` object in the same way."""
    return read_speculation({**_NOTHING, **numbers_of(value)}) if isinstance(value, Mapping) else None


Done = Callable[[ResponseTap, bool], None]


def tap(response: Any, done: Done, *, asynchronous: bool) -> None:
    """Call `done(reader, failed)` once when the body of an httpx or httpx2 `response` has ended or is closed."""
    content_type = response.headers.get("content-type", "")
    if response.is_stream_consumed:  # so `content` is complete and decoded
        reader = ResponseTap(content_type)
        reader.feed(response.content)
        done(reader, response.status_code >= 400)
        return
    reader = ResponseTap(content_type, response.headers.get("content-encoding", "").strip().lower())
    stream_type: Any = type(response.stream)
    kind = _stream_class("AsyncByteStream" if asynchronous else "SyncByteStream", stream_type)
    response.stream = kind(response.stream, reader, _once(done, response.status_code >= 400))


def _once(done: Done, failed_status: bool) -> Done:
    calls = iter([done])

    def finish(reader: ResponseTap, failed: bool) -> None:
        for call in calls:
            call(reader, failed or failed_status)

    return finish


@cache
def _stream_class(base_name: str, kind: Any) -> Any:
    """A stream class of the same library as `kind` that passes bytes on and also feeds them to a reader."""
    base: Any = next(parent for parent in kind.__mro__ if parent.__name__ == base_name)
    return type("TappedStream", (_AsyncTapped if base_name == "AsyncByteStream" else _Tapped, base), {})


class _Tapped:
    def __init__(self, stream: Any, reader: ResponseTap, done: Done) -> None:
        self._stream, self._reader, self._done = stream, reader, done

    def __iter__(self) -> Iterator[bytes]:
        try:
            for data in self._stream:
                self._reader.feed(data)
                yield data
        except Exception:
            self._done(self._reader, True)
            raise
        self._done(self._reader, False)

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            self._done(self._reader, False)


class _AsyncTapped:
    def __init__(self, stream: Any, reader: ResponseTap, done: Done) -> None:
        self._stream, self._reader, self._done = stream, reader, done

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for data in self._stream:
                self._reader.feed(data)
                yield data
        except Exception:
            self._done(self._reader, True)
            raise
        self._done(self._reader, False)

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            self._done(self._reader, False)
