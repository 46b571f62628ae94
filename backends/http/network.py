"""Sockets for the HTTP library: they tell how much has arrived, and whether the server has left an idle connection."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from typing import Any

from agentspec.backends.http.library import httpcore

MAX_UNREAD = 256 << 10
"""Bytes that wait to be read before the server is made to wait."""
_FALLBACK_SECONDS = 0.25  # RFC 8305: when the next address of a name is tried beside the first one


class SocketStream(asyncio.Protocol, httpcore.AsyncNetworkStream):
    """A connected socket. `received` counts the bytes that the server has sent so far."""

    def __init__(self) -> None:
        self.received = 0
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self._paused = False
        self._ended = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._writable = True

    @property
    def is_readable(self) -> bool:
        """Whether there is something to read, or the end. An idle connection with either is of no use any more."""
        return self._ended or bool(self._unread)

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """The next bytes, at most `max_bytes`; none at the end. Raises httpcore's `ReadTimeout` and `ReadError`."""
        if not self._unread and not self._ended:
            self._reader = self._loop.create_future()
            try:
                await self._wait(self._reader, timeout, httpcore.ReadTimeout)
            finally:
                self._reader = None
        if self._unread:
            return self._take(max_bytes)
        if self._error is not None:
            raise httpcore.ReadError(str(self._error)) from self._error
        return b""

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send `buffer`. Raises httpcore's `WriteTimeout` and `WriteError`."""
        if self._ended or self._transport is None:
            raise httpcore.WriteError("the connection is closed")
        self._transport.write(buffer)
        if not self._writable:
            self._writer = self._loop.create_future()
            try:
                await self._wait(self._writer, timeout, httpcore.WriteTimeout)
            finally:
                self._writer = None

    def close(self) -> None:
        """Close at once: what was not sent yet is dropped. Idempotent."""
        if self._transport is not None:
            self._transport.abort()

    async def aclose(self) -> None:
        self.close()

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":
            return self.is_readable
        names = {"client_addr": "sockname", "server_addr": "peername"}
        return None if self._transport is None else self._transport.get_extra_info(names.get(info, info))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        self._unread.append(data)
        self._unread_bytes += len(data)
        if self._unread_bytes > MAX_UNREAD and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        _wake(self._reader)

    def eof_received(self) -> None:
        self._ended = True
        _wake(self._reader)

    def connection_lost(self, error: Exception | None) -> None:
        self._ended, self._error = True, error
        _wake(self._reader)
        _wake(self._writer)

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        _wake(self._writer)

    def _take(self, max_bytes: int) -> bytes:
        data = self._unread.popleft()
        if len(data) > max_bytes:
            self._unread.appendleft(data[max_bytes:])
            data = data[:max_bytes]
        self._unread_bytes -= len(data)
        if self._paused and self._unread_bytes <= MAX_UNREAD // 2 and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def _wait(self, event: asyncio.Future[None], timeout: float | None, late: type[Exception]) -> None:
        handle = None if timeout is None else self._loop.call_later(timeout, _expire, event, late)
        try:
            await event
        finally:
            if handle is not None:
                handle.cancel()


async def connect(host: str, port: int, context: ssl.SSLContext | None, timeout: float | None) -> SocketStream:
    """A new connection, with TLS if there is a `context`. Raises httpcore's `ConnectTimeout` and `ConnectError`."""
    loop = asyncio.get_running_loop()
    options: dict[str, Any] = {} if context is None else {"ssl": context, "server_hostname": host}
    if isinstance(loop, asyncio.BaseEventLoop):  # uvloop tries the addresses one after the other
        options["happy_eyeballs_delay"] = _FALLBACK_SECONDS
    try:
        async with asyncio.timeout(timeout):
            _, stream = await loop.create_connection(SocketStream, host, port, **options)
    except TimeoutError as error:
        raise httpcore.ConnectTimeout(str(error)) from error
    except (OSError, UnicodeError) as error:
        raise httpcore.ConnectError(str(error)) from error
    return stream


def _wake(event: asyncio.Future[None] | None) -> None:
    if event is not None and not event.done():
        event.set_result(None)


def _expire(event: asyncio.Future[None], late: type[Exception]) -> None:
    if not event.done():
        event.set_exception(late())
