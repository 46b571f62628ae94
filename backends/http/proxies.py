"""Ways to a server: directly, or by the HTTP library through a proxy that the environment names."""

from __future__ import annotations

from typing import Any
from urllib.request import getproxies, proxy_bypass

from agentspec.backends.http.connections import KEEPALIVE_SECONDS, ConnectionPool, Headers, PooledAnswer, httpx

Transport = httpx.AsyncBaseTransport


def open_connections(
    url: httpx.URL, transport: Transport | None, address: str | None
) -> ConnectionPool | LibraryConnections:
    """The connections to the server of `url`: through `transport`, or the proxy that the environment names, if any.

    With `address`, one of those of the URL's host, that server is reached directly.
    """
    if transport is not None:
        return LibraryConnections(url, transport)
    proxy = _proxy(url) if address is None else None
    if proxy is None:
        return ConnectionPool(url, address)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_SECONDS)
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
        self.aclose = transport.aclose

    async def send(
        self, method: str, target: bytes, headers: Headers, body: bytes, timeouts: tuple[float | None, float | None]
    ) -> LibraryAnswer:
        url = self._url.copy_with(username=None, password=None, raw_path=target)
        extensions = {"timeout": httpx.Timeout(timeouts[1], connect=timeouts[0]).as_dict()}
        request = httpx.Request(method, url, headers=headers, content=body, extensions=extensions)
        return LibraryAnswer(await self._transport.handle_async_request(request))


class LibraryAnswer:
    """An answer of the HTTP library's, with its body as it was sent."""

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.headers = response.headers.raw
        self.aclose = response.aclose
        stream: Any = response.stream
        self._pieces = aiter(stream)

    async def read(self) -> bytes:
        """The next bytes of the body; nothing at its end."""
        async for piece in self._pieces:
            if piece:
                return bytes(piece)
        return b""


Answer = PooledAnswer | LibraryAnswer
