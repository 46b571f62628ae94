"""Reads usage and speculation off an HTTP answer while somebody else consumes it. Nothing is held back or changed.

The streams and responses are those of httpx or of httpx2, told apart by shape: neither is imported here.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import cache
from typing import Any

from agentspec.types import Speculation, Usage

_MAX_KEPT = 16 << 20  # bytes of a JSON body, or of one event, kept for parsing; a longer one is passed on unread


class ResponseTap:
    """Fed the raw body piece by piece, finds `usage` and `speculation` in a JSON body or the last events of a stream.

    A body in an encoding other than gzip or deflate, or one that is not JSON, is left unread: both stay None.
    """

    def __init__(self, content_type: str, encoding: str = "") -> None:
        self._events = content_type.startswith("text/event-stream")
        self._unzip = zlib.decompressobj(wbits=47) if encoding in ("gzip", "deflate") else None
        self._kept = bytearray()
        self._overflow = self._unzip is None and encoding not in ("", "identity")
        self._found: dict[str, Any] = {}

    def feed(self, data: bytes) -> None:
        """Read the next piece, cut anywhere."""
        if self._overflow:
            return
        try:
            self._kept += data if self._unzip is None else self._unzip.decompress(data)
        except zlib.error:
            self._overflow = True
        if self._events and b"\n" in self._kept:
            *lines, rest = self._kept.split(b"\n")
            self._kept = bytearray(rest)
            for line in lines:
                self._read_event(bytes(line))
        self._overflow = self._overflow or len(self._kept) > _MAX_KEPT

    def finish(self) -> tuple[Usage | None, Speculation | None]:
        """What was found once the body has ended, be it early."""
        if not self._overflow and self._events:
            self._read_event(bytes(self._kept))
        elif not self._overflow:
            self._read_object(bytes(self._kept))
        return usage_of(self._found.get("usage")), speculation_of(self._found.get("speculation"))

    def _read_event(self, line: bytes) -> None:
        if line.startswith(b"data:") and (b'"usage"' in line or b'"speculation"' in line):
            self._read_object(line[5:])

    def _read_object(self, data: bytes) -> None:
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            return
        if isinstance(body, dict):
            inner = body.get("response")  # the Responses API's last event wraps the whole answer
            body = inner if isinstance(inner, dict) else body
            self._found.update({key: body[key] for key in ("usage", "speculation") if body.get(key)})


def usage_of(value: Any) -> Usage | None:
    """A `usage` object of the Chat Completions or the Responses API; None if it is not one."""
    if not isinstance(value, Mapping):
        return None
    prompt = value.get("prompt_tokens", value.get("input_tokens"))
    completion = value.get("completion_tokens", value.get("output_tokens"))
    read = value.get("prompt_tokens_details") or value.get("input_tokens_details") or {}
    written = value.get("completion_tokens_details") or {}
    return Usage(
        prompt_tokens=_count(prompt),
        completion_tokens=_count(completion),
        cached_tokens=_count(_part(read, "cached_tokens")),
        accepted_prediction_tokens=_part(written, "accepted_prediction_tokens"),
        rejected_prediction_tokens=_part(written, "rejected_prediction_tokens"),
    )


def speculation_of(value: Any) -> Speculation | None:
    """A gateway's `speculation` object; None if it is not one."""
    if not isinstance(value, Mapping):
        return None
    saved = value.get("estimated_seconds_saved")
    return Speculation(
        drafted=_count(value.get("drafted")),
        accepted=_count(value.get("accepted")),
        steps=_count(value.get("steps")),
        estimated_seconds_saved=float(saved) if isinstance(saved, (int, float)) else 0.0,
    )


def _part(details: Any, name: str) -> Any:
    return details.get(name) if isinstance(details, Mapping) else None


def _count(value: Any) -> int:
    """A number of somebody else's; anything else counts as nothing, since reading must not break the answer."""
    return int(value) if isinstance(value, (int, float)) and 0 <= value < math.inf else 0


Done = Callable[[ResponseTap, bool], None]


def tap(response: Any, done: Done, *, asynchronous: bool) -> None:
    """Have `done(reader, failed)` called once when the body of an httpx or httpx2 `response` has ended or is closed."""
    content_type = response.headers.get("content-type", "")
    if response.is_stream_consumed:  # and `content` decoded
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
    """A stream class of the same library as `kind`, which passes bytes on and shows them to a reader."""
    base: Any = next(parent for parent in kind.__mro__ if parent.__name__ == base_name)
    return type("WatchedStream", (_AsyncWatched if base_name == "AsyncByteStream" else _Watched, base), {})


class _Watched:
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


class _AsyncWatched:
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
