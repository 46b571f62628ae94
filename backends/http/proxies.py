"""Ways to a server: directly, or by the HTTP library through a proxy that the environment names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast
from urllib.request import getproxies, proxy_bypass

from agentspec.backends.http.connections import ConnectionPool, OutgoingRequest, PooledAnswer, httpx

Transport = httpx.AsyncBaseTransport


def open_connections(
    url: httpx.URL, keepalive_expiry: float, transport: Transport | None, address: str | None = None
) -> ConnectionPool | LibraryConnections:
    """The connections to the server of `url`: through `transport`, or the proxy that the environment names, if any.

    One that was idle for `keepalive_expiry` seconds is not used again. With `address`, one of those that the URL's host
    has, that server is reached directly.
    """
    if transport is not None:
        return LibraryConnections(url, transport)
    proxy = _proxy(url) if address is None else None
    if proxy is None:
        return ConnectionPool(url, keepalive_expiry, address)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=keepalive_expiry)
    return LibraryConnections(url, httpx.AsyncHTTPTransport(proxy=proxy, limits=limits))


def _proxy(url: httpx.URL) -> str | None:
    """The proxy for `url` by `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`."""
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy is None or proxy_bypass(url.host):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


class LibraryConnections:
    """The connections that a transport of the HTTP library holds. Methods raise httpx's errors."""

    def __init__(self, url: httpx.URL, transport: Transport) -> None:
        self._url, self._transport = url, transport

    async def send(self, request: OutgoingRequest) -> LibraryAnswer:
        timeout = httpx.Timeout(request.read_timeout, connect=request.connect_timeout)
        response = await self._transport.handle_async_request(
            httpx.Request(
                request.method,
                self._url.copy_with(username=None, password=None, raw_path=request.target),
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


Answer = PooledAnswer | LibraryAnswer
