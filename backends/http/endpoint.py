"""One upstream's address, key and connections."""

from __future__ import annotations

import asyncio
import base64
import logging
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import quote

from agentspec.backends.base import MESSAGES, NONE
from agentspec.backends.http.connections import ConnectionPool, OutgoingRequest, httpx
from agentspec.backends.http.proxies import LibraryConnections, Transport, open_connections
from agentspec.backends.http.response import (
    ACCOUNT_HEADERS,
    MAX_ANSWER_BYTES,
    REQUEST_HEADERS,
    REQUEST_PREFIXES,
    UpstreamResponse,
    allowed,
    mapped_errors,
    status_error,
)
from agentspec.backends.settings import OpenAISettings, read_secret, sendable
from agentspec.errors import UpstreamError

logger = logging.getLogger(__name__)
CONNECT_SECONDS = 3.0  # enough for two lost packets
KEEPALIVE_SECONDS = 4.0  # that an idle connection is kept: vLLM closes one after 5
Connections = ConnectionPool | LibraryConnections
_SAFE = "/:?@!$&'()*+,;=%[]~"  # characters of a target that stand for themselves


class Endpoint:
    """One upstream's address, key and connections. It never follows redirects, and keeps no cookies.

    Errors call it `name`, since they reach clients, who are not to know the address; without a name, the address.
    `address` is the one to connect to of those that the URL's host has.
    Connections belong to an event loop, so each running loop has its own pool; the pool of a deleted loop is dropped.
    """

    def __init__(
        self,
        settings: OpenAISettings,
        *,
        name: str | None = None,
        transport: Transport | None = None,
        address: str | None = None,
    ) -> None:
        self._url = httpx.URL(str(settings.url).rstrip("/"))
        self._base = self._url.raw_path.decode().rstrip("/")
        self._address = address
        self._authorization = _authorization(settings, self._url)
        self._timeouts = (CONNECT_SECONDS, settings.read_timeout)
        self._transport = transport
        self._pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Connections] = weakref.WeakKeyDictionary()
        self._shown = str(self._url.copy_with(username=None, password=None, query=None))
        self.name = self._shown if name is None else repr(name)

    @property
    def has_key(self) -> bool:
        return self._authorization is not None

    def __repr__(self) -> str:
        return f"Endpoint({self._shown!r}, api_key={'set' if self.has_key else 'none'})"

    @asynccontextmanager
    async def send(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        body: bytes = b"",
        query: str = "",
        timeout: float | None = None,
        above: bool = False,
        told: Mapping[str, str] = NONE,
        probing: bool = False,
    ) -> AsyncIterator[UpstreamResponse]:
        """Send `body` and yield the answer once its headers have arrived; leaving the block closes the stream.

        Headers outside the allow-list are dropped, save those in `told`; the endpoint's own key replaces a given
        Authorization. `timeout`
        in seconds replaces the configured one for each phase; `above` means a path beside `/v1`, not below. Failures
        are logged, of a request that is `probing` at level DEBUG. Raises
        `UpstreamError` when nothing answers, and for a redirect, which would carry the key elsewhere.
        """
        sent = {"accept": "*/*", "user-agent": "agentspec"}
        sent |= allowed(headers.items(), REQUEST_HEADERS, REQUEST_PREFIXES) | {"accept-encoding": "identity"}
        if self._authorization is not None:
            sent = {key: value for key, value in sent.items() if key not in ACCOUNT_HEADERS}
            sent |= self._own_key(path, self._authorization)
        sent |= told
        with self._logged_errors(logging.DEBUG if probing else logging.INFO):
            target = self._target(path, query, above=above)
            given = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in sent.items()]
            timeouts = self._timeouts if timeout is None else (timeout, timeout)
            answer = await self._connections().send(OutgoingRequest(method, target, given, body, *timeouts))
        try:
            if answer.status >= 600:
                raise UpstreamError(f"upstream {self.name} answered {answer.status}, which is no status of HTTP")
            if not 200 <= answer.status < 300 and answer.status < 400:
                raise UpstreamError(f"upstream {self.name} answered {answer.status}; redirects are not followed")
            yield UpstreamResponse(answer, self.name, own_key=self.has_key)
        finally:
            await answer.aclose()

    def _own_key(self, path: str, authorization: str) -> dict[str, str]:
        """The headers that carry the operator's key. Anthropic's routes are asked for it as `x-api-key`; its own host
        takes a bearer for something else.
        """
        scheme, _, key = authorization.partition(" ")
        if not path.startswith(MESSAGES) or scheme != "Bearer":
            return {"authorization": authorization}
        is_anthropic = self._url.host.endswith("anthropic.com")
        return {"x-api-key": key} | ({} if is_anthropic else {"authorization": authorization})

    async def fetch(
        self,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        timeout: float | None = None,
        above: bool = False,
        limit: int = MAX_ANSWER_BYTES,
        probing: bool = False,
    ) -> bytes:
        """Send a JSON `body`; returns the whole answer. Raises as `send`, and `UpstreamStatusError` for an error."""
        headers = {"content-type": "application/json"} if body else {}
        options: dict[str, Any] = {"timeout": timeout, "above": above, "probing": probing}
        async with self.send(method, path, headers=headers, body=body, **options) as response:
            content = await response.aread(limit)
            if response.status >= 400:
                raise status_error(self.name, response.status, content, response.headers)
            return content

    async def aclose(self) -> None:
        """Close the connections of the running loop and drop those of other loops. Idempotent."""
        await self.leave_loop()
        self._pools.clear()

    async def leave_loop(self) -> None:
        """Close the connections of the running loop only, before the loop ends. Idempotent."""
        pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await pool.aclose()

    @contextmanager
    def _logged_errors(self, level: int) -> Iterator[None]:
        """Map errors, and log them with the address."""
        try:
            with mapped_errors(self.name):
                yield
        except UpstreamError as error:
            logger.log(level, "%s: %s", self._shown, error.message)
            raise

    def _connections(self) -> Connections:
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            for ended in [other for other in self._pools if other.is_closed()]:
                del self._pools[ended]  # a pool refers to its loop, so that it would never be freed
            pool = self._pools[loop] = open_connections(self._url, KEEPALIVE_SECONDS, self._transport, self._address)
        return pool

    def _target(self, path: str, query: str, *, above: bool) -> bytes:
        base = self._base.removesuffix("/v1") if above else self._base
        return (base + quote(path, _SAFE) + ("?" + quote(query, _SAFE) if query else "")).encode()


def _authorization(settings: OpenAISettings, url: httpx.URL) -> str | None:
    """The header that carries the operator's key, or the user and password of the address."""
    if url.userinfo:
        given = f"{url.username}:{url.password}".encode()
        return f"Basic {base64.b64encode(given).decode()}"
    key = _api_key(settings)
    return None if key is None else f"Bearer {key}"


def _api_key(settings: OpenAISettings) -> str | None:
    if settings.api_key is not None:
        return sendable(settings.api_key.get_secret_value().strip(), "api_key")
    if settings.api_key_file is None:
        return None
    return sendable(read_secret(settings.api_key_file, "api_key_file"), f"api_key_file {settings.api_key_file!r}")
