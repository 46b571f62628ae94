"""Connections to one server, which speak HTTP/1.1: an asyncio protocol each, whose answers httptools parses.

A chunk of a streamed answer takes 3.6 us of processor time here, 5.7 in aiohttp and 16.1 in httpx2 (medians of seven
runs of 16 streams, November 2026), and aiohttp does not repeat a POST whose reused connection turns out to be closed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import httptools

if TYPE_CHECKING:
    import httpcore2 as httpcore
    import httpx2 as httpx
else:
    try:  # httpx2, which the extra `proxy` brings, or else httpx: both have the same interface
        import httpcore2 as httpcore
        import httpx2 as httpx
    except ModuleNotFoundError:
        import httpcore
        import httpx

__all__ = ["ConnectionPool", "NothingAnsweredError", "PooledAnswer", "httpcore", "httpx"]
MAX_UNREAD = 64 << 10  # bytes of an answer that wait to be read before the server has to wait
MAX_HEAD_BYTES = 256 << 10
KEEPALIVE_SECONDS = 4.0  # that an idle connection is reused: vLLM closes one after 5
_FALLBACK_SECONDS = 0.25  # RFC 8305: after these the next address of a name is tried as well
_EMPTY = (204, 304)  # statuses of answers without a body
Headers = list[tuple[bytes, bytes]]


class NothingAnsweredError(httpcore.NetworkError):
    """The connection broke before any byte of an answer."""


class HttpConnection(asyncio.Protocol):
    """One connection, for one call at a time: `send`, `read_head`, then `read` until it returns nothing.

    All raise httpcore's errors. `begun`: a byte of the current answer has arrived.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._pieces: list[bytes] = []
        self._paused = self._closed = False
        self._failure: Exception | None = None
        self.idle_since = 0.0
        self._prepare()

    def _prepare(self) -> None:
        self._parser: Any = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: Headers = []
        self.begun = self.complete = self._framed = self._reusable = self._spoilt = False
        self._head_bytes = self._unread = self._unsent = 0
        self._timeout: float | None = None
        self._waiting_since = 0.0

    # The pool calls these.

    def send(self, data: bytes, timeout: float | None) -> None:
        """Send a whole request. Each wait for a part of its answer then takes at most `timeout` seconds, which begin
        again while the server takes more of the request.
        """
        if self.complete:
            self._prepare()
        if self._closed or self._transport is None:
            raise httpcore.WriteError("the connection is closed")
        self._timeout = timeout
        if self._timer is not None and (timeout is None or self._timer.when() > self._loop.time() + timeout):
            self._timer.cancel()  # it was set for a call that might take longer
            self._timer = None
        self._transport.write(data)
        self._unsent = self._transport.get_write_buffer_size()

    async def read_head(self) -> None:
        """Wait until `status` and `headers` have arrived."""
        while not self.status:
            await self._wait()

    async def read(self) -> bytes:
        """What has arrived of the body since the last call, or else the next bytes; nothing at the end."""
        while not self._pieces:
            if self.complete:
                return b""
            await self._wait()
        taken = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._unread = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return taken

    @property
    def is_idle(self) -> bool:
        """Whether the last answer is over and was read, and another call may follow on this connection."""
        return self.complete and self._reusable and not self._closed and not self._pieces

    def close(self) -> None:
        """Close at once: what was not sent yet is dropped, and what was not read. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    # The transport calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.complete:
            self.close()  # no request precedes this: some servers send 408 before they close an idle connection
            return
        self.begun = True
        if not self.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.complete:
                self._fail(httpcore.RemoteProtocolError(f"the answer is not HTTP/1.1: {type(error).__name__}"))
                return
            self.close()  # the bytes after a whole answer belong to no request
        if self._head_bytes > MAX_HEAD_BYTES:
            self._fail(httpcore.RemoteProtocolError(f"the answer's head is longer than {MAX_HEAD_BYTES} bytes"))
        elif self._unread > MAX_UNREAD and not (self._paused or self._closed) and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        if self.status:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._parser = self._transport = None  # they hold this object, too
        if self._timer is not None:
            self._timer.cancel()
        if self.complete:
            return
        if self.status and not self._framed and exc is None:
            self.complete = True  # a body without a length ends with the connection
            self._wake()
        elif exc is not None:
            self._fail(httpcore.ReadError(str(exc)))
        else:
            self._fail(httpcore.RemoteProtocolError("the server closed the connection before its answer was complete"))

    # The parser calls these.

    def on_message_begin(self) -> None:
        if self.complete:  # a second answer to one request is ignored, and so is all that follows
            self._spoilt, self._reusable = True, False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:  # what follows the body are trailers
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._spoilt:
            return
        if status < 200:
            self.headers.clear()  # of 100 Continue and 103 Early Hints
            return
        self._head_bytes = sum(len(name) + len(value) for name, value in self.headers)
        self._framed = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        self.status = status

    def on_body(self, data: bytes) -> None:
        if not self._spoilt:
            self._pieces.append(data)
            self._unread += len(data)

    def on_message_complete(self) -> None:
        self.complete = bool(self.status)
        self._reusable = (
            self._parser.should_keep_alive() and (self._framed or self.status in _EMPTY) and not self._spoilt
        )

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiter = waiter = self._loop.create_future()
        self._waiting_since = self._loop.time()
        if self._timer is None and self._timeout is not None:
            self._timer = self._loop.call_later(self._timeout, self._look)
        try:
            await waiter
        finally:
            self._waiter = None

    def _look(self) -> None:
        """Fail a wait that takes too long. One timer serves many waits: it sets itself again for the last one."""
        self._timer = None
        if self._waiter is None or self._waiter.done() or self._timeout is None or self._transport is None:
            return
        left = self._waiting_since + self._timeout - self._loop.time()
        unsent = self._transport.get_write_buffer_size()
        if unsent < self._unsent:
            self._unsent, left = unsent, self._timeout
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self._fail(httpcore.ReadTimeout(f"nothing came for {self._timeout:g} seconds"))

    def _fail(self, failure: Exception) -> None:
        if self._failure is None:
            self._failure = failure
        if not self._closed:
            self.close()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(self._failure)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ConnectionPool:
    """Connections to the server of one URL, each used by one call at a time; the one used last is used next.

    The cost of a call does not depend on how many there are: httpx's own pool looks at all of them for each call.
    A server may close an idle connection at the moment when a request is sent on it. So if a reused connection breaks
    before any byte of the answer, the request is sent once more, on a new connection. With `address`, connections go
    to this one of the addresses of the URL's host.
    """

    def __init__(self, url: httpx.URL, address: str | None = None) -> None:
        secure = url.scheme == "https"
        self._name, self._host, self._port = url.host, address or url.host, url.port or (443 if secure else 80)
        self._host_header = b"host: " + url.netloc
        self._context = httpx.create_ssl_context() if secure else None
        if self._context is not None:
            self._context.set_alpn_protocols(["http/1.1"])
        self._idle: deque[HttpConnection] = deque()
        self._closed = False

    async def send(
        self, method: str, target: bytes, headers: Headers, body: bytes, timeouts: tuple[float | None, float | None]
    ) -> PooledAnswer:
        """Send a request, with headers besides Host and Content-Length; the answer's body is yet to be read.

        `timeouts` are those to connect and to read, in seconds. Raises httpcore's errors.
        """
        data = _request_bytes(method, target, [self._host_header, *(b"%s: %s" % pair for pair in headers)], body)
        connect_timeout, read_timeout = timeouts
        if (used := self._take()) is not None:
            try:
                return await self._exchange(used, data, read_timeout)
            except NothingAnsweredError:
                pass
        return await self._exchange(await self._connect(connect_timeout), data, read_timeout)

    async def aclose(self) -> None:
        """Close the idle connections; one in use is closed at the end of its call. Idempotent."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def give_back(self, connection: HttpConnection) -> None:
        """Store the connection of an answer that is over for the next call, and close the one of any other answer."""
        if self._closed or not connection.is_idle:
            connection.close()
            return
        connection.idle_since = now = asyncio.get_running_loop().time()
        self._idle.append(connection)
        while self._idle[0].idle_since + KEEPALIVE_SECONDS <= now:
            self._idle.popleft().close()

    def _take(self) -> HttpConnection | None:
        """The idle connection that was used last, if it can be used again."""
        oldest = asyncio.get_running_loop().time() - KEEPALIVE_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since > oldest and connection.is_idle:
                return connection
            connection.close()
        return None

    async def _connect(self, timeout: float | None) -> HttpConnection:
        """A new connection, by TLS if the URL says so. Raises httpcore's `ConnectTimeout` and `ConnectError`."""
        loop = asyncio.get_running_loop()
        options: dict[str, Any] = {}
        if self._context is not None:
            options = {"ssl": self._context, "server_hostname": self._name}
        if isinstance(loop, asyncio.BaseEventLoop):  # uvloop tries the addresses one after the other
            options["happy_eyeballs_delay"] = _FALLBACK_SECONDS
        try:
            async with asyncio.timeout(timeout):
                _, connection = await loop.create_connection(HttpConnection, self._host, self._port, **options)
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(str(error)) from error
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(str(error)) from error
        return connection

    async def _exchange(self, connection: HttpConnection, data: bytes, timeout: float | None) -> PooledAnswer:
        try:
            connection.send(data, timeout)
            await connection.read_head()
        except BaseException as error:
            connection.close()
            if isinstance(error, (httpcore.NetworkError, httpcore.RemoteProtocolError)) and not connection.begun:
                raise NothingAnsweredError(str(error)) from error
            raise
        return PooledAnswer(connection, self)


class PooledAnswer:
    """The answer on a connection of a pool, to which closing it gives the connection back."""

    def __init__(self, connection: HttpConnection, pool: ConnectionPool) -> None:
        self.status, self.headers = connection.status, connection.headers
        self._connection: HttpConnection | None = connection
        self._pool = pool

    async def read(self) -> bytes:
        """The next bytes of the body; nothing at its end."""
        return b"" if self._connection is None else await self._connection.read()

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.give_back(connection)


def _request_bytes(method: str, target: bytes, lines: list[bytes], body: bytes) -> bytes:
    """The whole request: one write, and so one call of the system, for head and body."""
    lines = [b"%s %s HTTP/1.1" % (method.encode("ascii"), target), *lines]
    if body or method == "POST":
        lines.append(b"content-length: %d" % len(body))
    head = b"\r\n".join([*lines, b"", b""])
    if head.count(b"\n") != len(lines) + 1 or head.count(b"\r") != len(lines) + 1 or b"\0" in head:
        raise httpcore.LocalProtocolError("a header holds the end of a line")
    return head + body
