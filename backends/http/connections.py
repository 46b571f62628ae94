"""Keeps connections to one server for further calls."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast
from urllib.request import getproxies, proxy_bypass

from agentspec.backends.http.library import httpcore, httpx
from agentspec.backends.http.network import HttpConnection, NothingAnsweredError, connect, connect_unix

Transport = httpx.AsyncBaseTransport


@dataclass(slots=True)
class OutgoingRequest:
    """A request without the headers that tell its address and its length. Timeouts are in seconds, None for none."""

    method: str
    url: httpx.URL
    headers: list[tuple[bytes, bytes]]
    body: bytes
    connect_timeout: float | None
    read_timeout: float | None


class RawAnswer(Protocol):
    """An answer whose head has arrived. Iterating yields the body as it arrives; `aclose` ends what is under way."""

    status: int
    headers: list[tuple[bytes, bytes]]

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None: ...


class ServerConnections(Protocol):
    """The way to one server. Methods raise httpx's or httpcore's errors."""

    async def send(self, request: OutgoingRequest) -> RawAnswer: ...

    async def aclose(self) -> None: ...


def open_connections(
    url: httpx.URL, keepalive_expiry: float, transport: Transport | None, address: str | None = None
) -> ServerConnections:
    """The connections to the server of `url`: through `transport`, or the proxy that the environment names, if any.

    One that was idle for `keepalive_expiry` seconds is not used again. With `address`, one of those that the URL's host
    has, that server is reached directly.
    """
    if transport is not None:
        return LibraryConnections(transport)
    proxy = _proxy(url) if address is None else None
    if proxy is None:
        return ConnectionPool(url, keepalive_expiry, address=address)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=keepalive_expiry)
    return LibraryConnections(httpx.AsyncHTTPTransport(proxy=proxy, limits=limits))


def _proxy(url: httpx.URL) -> str | None:
    """The proxy for `url` by `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`."""
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy is None or proxy_bypass(url.host):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


class LibraryConnections:
    """The connections that a transport of the HTTP library keeps."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def send(self, request: OutgoingRequest) -> RawAnswer:
        timeout = httpx.Timeout(request.read_timeout, connect=request.connect_timeout)
        response = await self._transport.handle_async_request(
            httpx.Request(
                request.method,
                request.url,
                headers=request.headers,
                content=request.body,
                extensions={"timeout": timeout.as_dict()},
            )
        )
        return LibraryAnswer(response)

    async def aclose(self) -> None:
        await self._transport.aclose()


class LibraryAnswer:
    """An answer of the HTTP library's, with its body as it was sent."""

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.headers = response.headers.raw
        self._response = response
        self._stream: Any = response.stream

    def __aiter__(self) -> AsyncIterator[bytes]:
        return cast(AsyncIterator[bytes], aiter(self._stream))

    async def aclose(self) -> None:
        await self._response.aclose()


class ConnectionPool:
    """Connections to the server of one URL, each used by one call at a time; the one used last is used next.

    What a call costs does not depend on how many there are: httpx's own pool looks at all of them for each call.
    A server may close an idle connection at the moment when a request is sent on it. So if a connection that was used
    before breaks before any byte of the answer, the request is sent once more, on a new connection. With `path`, the
    server listens on that Unix socket; with `address`, it is this one of the URL's host.
    """

    def __init__(
        self, url: httpx.URL, keepalive_expiry: float, path: str | None = None, address: str | None = None
    ) -> None:
        self._path = path
        self._address = address
        secure = url.scheme == "https"
        self._host, self._port = url.host, url.port or (443 if secure else 80)
        self._context = _tls() if secure else None
        self._expiry = keepalive_expiry
        self._idle: deque[HttpConnection] = deque()
        self._reaper: asyncio.TimerHandle | None = None

    async def send(self, request: OutgoingRequest) -> RawAnswer:
        """Send the request; the answer's body is yet to be read. Raises httpcore's errors."""
        data = _request_bytes(request)
        used = self._take()
        if used is not None:
            try:
                return await self._exchange(used, data, request.read_timeout)
            except NothingAnsweredError:
                pass
        return await self._exchange(await self._connect(request.connect_timeout), data, request.read_timeout)

    async def aclose(self) -> None:
        """Close the idle connections; one in use is closed at the end of its call. Idempotent."""
        self._expiry = 0.0
        self._close_idle()

    async def _connect(self, timeout: float | None) -> HttpConnection:
        if self._path is not None:
            return await connect_unix(self._path, timeout)
        return await connect(self._address or self._host, self._port, self._context, timeout, self._host)

    async def _exchange(self, connection: HttpConnection, data: bytes, timeout: float | None) -> RawAnswer:
        try:
            connection.send(data, timeout)
            await connection.read_head()
        except BaseException as error:
            connection.close()
            if isinstance(error, (httpcore.NetworkError, httpcore.RemoteProtocolError)) and not connection.begun:
                raise NothingAnsweredError(str(error)) from error
            raise
        return PooledAnswer(connection, self._give_back)

    def _take(self) -> HttpConnection | None:
        """The idle connection that was used last, if it can be used again."""
        oldest = asyncio.get_running_loop().time() - self._expiry
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since > oldest and connection.is_idle:
                return connection
            connection.close()
        return None

    def _give_back(self, connection: HttpConnection) -> None:
        """Keep the connection of an answer that is over, and close the one of an answer that is given up."""
        if self._expiry <= 0 or not connection.is_idle:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.append(connection)
        if self._reaper is None:
            self._reaper = loop.call_later(self._expiry, self._close_idle)

    def _close_idle(self) -> None:
        """Close the connections that were idle for too long, and come back for the next one."""
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._idle and self._idle[0].idle_since + self._expiry <= now:
            self._idle.popleft().close()
        if self._idle:
            self._reaper = loop.call_at(self._idle[0].idle_since + self._expiry, self._close_idle)


class PooledAnswer:
    """The answer on a connection of the pool. Closing it gives the connection back."""

    def __init__(self, connection: HttpConnection, give_back: Callable[[HttpConnection], None]) -> None:
        self.status, self.headers = connection.status, connection.headers
        self._connection: HttpConnection | None = connection
        self._give_back = give_back

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        piece = b"" if self._connection is None else await self._connection.read()
        if not piece:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._give_back(connection)


def _request_bytes(request: OutgoingRequest) -> bytes:
    """The whole request: one write, and so one call of the system, for head and body."""
    lines = [b"%s %s HTTP/1.1" % (request.method.encode("ascii"), request.url.raw_path)]
    lines.append(b"host: " + request.url.netloc)
    lines += [b"%s: %s" % pair for pair in request.headers]
    if request.body or request.method == "POST":
        lines.append(b"content-length: %d" % len(request.body))
    head = b"\r\n".join([*lines, b"", b""])
    if head.count(b"\n") != len(lines) + 1 or head.count(b"\r") != len(lines) + 1 or b"\0" in head:
        raise httpcore.LocalProtocolError("a header holds the end of a line")
    return head + request.body


def _tls() -> ssl.SSLContext:
    context = httpx.create_ssl_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
