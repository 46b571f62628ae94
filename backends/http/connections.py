"""Keeps connections to one server for further calls."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.request import getproxies, proxy_bypass

from agentspec.backends.http.library import httpcore, httpx
from agentspec.backends.http.network import SocketStream, connect

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


@dataclass(slots=True)
class _Connection:
    """`seen` are the bytes that had arrived when it became idle, at `since` by the loop's clock."""

    http: httpcore.AsyncHTTP11Connection
    stream: SocketStream
    since: float = 0.0
    seen: int = 0

    def rest(self, now: float) -> None:
        self.since, self.seen = now, self.stream.received


class ConnectionPool(httpx.AsyncBaseTransport):
    """Connections to the server of one URL, each used by one call at a time; the one used last is used next.

    What a call costs does not depend on how many there are: httpx's own pool looks at all of them for each call.
    A server may close an idle connection at the moment when a request is sent on it. So if a connection that was used
    before breaks before any byte of the answer, the request is sent once more, on a new connection.
    """

    def __init__(self, url: httpx.URL, keepalive_expiry: float) -> None:
        secure = url.scheme == "https"
        self._host, self._port = url.host, url.port or (443 if secure else 80)
        self._origin = httpcore.Origin(url.raw_scheme, url.raw_host, self._port)
        self._context = _tls() if secure else None
        self._expiry = keepalive_expiry
        self._idle: deque[_Connection] = deque()
        self._reaper: asyncio.TimerHandle | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request; the answer's body is yet to be read. Raises httpcore's errors."""
        sent = httpcore.Request(
            method=request.method,
            url=httpcore.URL(
                scheme=request.url.raw_scheme,
                host=request.url.raw_host,
                port=request.url.port,
                target=request.url.raw_path,
            ),
            headers=request.headers.raw,
            content=cast(Any, request.stream),
            extensions=request.extensions,
        )
        used = self._take()
        if used is not None:
            try:
                return self._answer(used, await used.http.handle_async_request(sent))
            except (httpcore.NetworkError, httpcore.RemoteProtocolError):
                if used.stream.received > used.seen:
                    raise
        new = await self._connect(request.extensions.get("timeout", {}))
        return self._answer(new, await new.http.handle_async_request(sent))

    async def aclose(self) -> None:
        """Close the idle connections; one in use is closed at the end of its call. Idempotent."""
        self._expiry = 0.0
        self._close_idle()

    async def _connect(self, timeouts: Mapping[str, float | None]) -> _Connection:
        stream = await connect(self._host, self._port, self._context, timeouts.get("connect"))
        return _Connection(httpcore.AsyncHTTP11Connection(self._origin, stream), stream)

    def _answer(self, connection: _Connection, answer: httpcore.Response) -> httpx.Response:
        body = _Body(answer, lambda: self._give_back(connection))
        return httpx.Response(answer.status, headers=answer.headers, stream=body, extensions=answer.extensions)

    def _take(self) -> _Connection | None:
        """The idle connection that was used last, if it can be used again."""
        oldest = asyncio.get_running_loop().time() - self._expiry
        while self._idle:
            connection = self._idle.pop()
            if connection.since > oldest and not connection.stream.is_readable:
                return connection
            connection.stream.close()
        return None

    def _give_back(self, connection: _Connection) -> None:
        if not connection.http.is_idle():
            return
        loop = asyncio.get_running_loop()
        connection.rest(loop.time())
        if self._expiry <= 0 or connection.stream.is_readable:
            connection.stream.close()
            return
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
        while self._idle and self._idle[0].since + self._expiry <= now:
            self._idle.popleft().stream.close()
        if self._idle:
            self._reaper = loop.call_at(self._idle[0].since + self._expiry, self._close_idle)


class _Body(httpx.AsyncByteStream):
    """An answer's body. Closing it gives the connection back if the whole body was read, and breaks it off if not."""

    def __init__(self, answer: httpcore.Response, done: Callable[[], None]) -> None:
        self._stream: Any = answer.stream
        self._done = done

    def __aiter__(self) -> AsyncIterator[bytes]:
        return cast(AsyncIterator[bytes], aiter(self._stream))

    async def aclose(self) -> None:
        await self._stream.aclose()
        self._done()


def _tls() -> ssl.SSLContext:
    context = httpx.create_ssl_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
