"""Keeps connections to one server for further calls."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from urllib.request import getproxies, proxy_bypass

from agentspec.backends.http.library import httpcore, httpx
from agentspec.backends.http.network import HttpConnection, connect

Transport = httpx.AsyncBaseTransport


def open_transport(url: httpx.URL, keepalive_expiry: float) -> Transport:
    """The connections to the server of `url`: through the proxy that the environment names for it, if any.

    One that was idle for `keepalive_expiry` seconds is not used again.
    """
    proxy = _proxy(url)
    if proxy is None:
        return ConnectionPool(url, keepalive_expiry)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=keepalive_expiry)
    return httpx.AsyncHTTPTransport(proxy=proxy, limits=limits)


def _proxy(url: httpx.URL) -> str | None:
    """The proxy for `url` by `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`."""
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy is None or proxy_bypass(url.host):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


class ConnectionPool(httpx.AsyncBaseTransport):
    """Connections to the server of one URL, each used by one call at a time; the one used last is used next.

    What a call costs does not depend on how many there are: httpx's own pool looks at all of them for each call.
    A server may close an idle connection at the moment when a request is sent on it. So if a connection that was used
    before breaks before any byte of the answer, the request is sent once more, on a new connection.
    """

    def __init__(self, url: httpx.URL, keepalive_expiry: float) -> None:
        secure = url.scheme == "https"
        self._host, self._port = url.host, url.port or (443 if secure else 80)
        self._context = _tls() if secure else None
        self._expiry = keepalive_expiry
        self._idle: deque[HttpConnection] = deque()
        self._reaper: asyncio.TimerHandle | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request; the answer's body is yet to be read. Raises httpcore's errors."""
        timeouts: Mapping[str, float | None] = request.extensions.get("timeout", {})
        data = _request_bytes(request)
        used = self._take()
        if used is not None:
            try:
                return await self._exchange(used, data, timeouts.get("read"))
            except (httpcore.NetworkError, httpcore.RemoteProtocolError):
                if used.begun:
                    raise
        new = await connect(self._host, self._port, self._context, timeouts.get("connect"))
        return await self._exchange(new, data, timeouts.get("read"))

    async def aclose(self) -> None:
        """Close the idle connections; one in use is closed at the end of its call. Idempotent."""
        self._expiry = 0.0
        self._close_idle()

    async def _exchange(self, connection: HttpConnection, data: bytes, timeout: float | None) -> httpx.Response:
        try:
            connection.send(data, timeout)
            await connection.read_head()
        except BaseException:
            connection.close()
            raise
        body = _Body(connection, self._give_back)
        return httpx.Response(connection.status, headers=connection.headers, stream=body)

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


class _Body(httpx.AsyncByteStream):
    """An answer's body in pieces, as they arrive. Closing it gives the connection back."""

    def __init__(self, connection: HttpConnection, give_back: Callable[[HttpConnection], None]) -> None:
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


def _request_bytes(request: httpx.Request) -> bytes:
    """The whole request: one write, and so one call of the system, for head and body."""
    lines = [b"%s %s HTTP/1.1" % (request.method.encode("ascii"), request.url.raw_path)]
    lines += [b"%s: %s" % pair for pair in request.headers.raw]
    head = b"\r\n".join([*lines, b"", b""])
    if head.count(b"\n") != len(lines) + 1 or head.count(b"\r") != len(lines) + 1 or b"\0" in head:
        raise httpcore.LocalProtocolError("a header holds the end of a line")
    return head + request.content


def _tls() -> ssl.SSLContext:
    context = httpx.create_ssl_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
