"""One upstream's address, key and connections."""

from __future__ import annotations

import asyncio
import base64
import logging
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

from agentspec.backends.base import MESSAGES, NONE
from agentspec.backends.http.connections import ConnectionPool, httpx
from agentspec.backends.http.errors import status_error
from agentspec.backends.http.proxies import Answer, LibraryConnections, Transport, open_connections
from agentspec.backends.http.response import (
    ACCOUNT_HEADERS,
    MAX_ANSWER_BYTES,
    REQUEST_HEADERS,
    REQUEST_PREFIXES,
    UpstreamResponse,
    allowed,
    mapped_errors,
)
from agentspec.backends.settings import OpenAISettings, read_secret, sendable
from agentspec.errors import UpstreamError

logger = logging.getLogger(__name__)
ANTHROPIC = ".anthropic.com"
CONNECT_SECONDS = 3.0  # enough for two lost packets
Connections = ConnectionPool | LibraryConnections
_SAFE = "/:?@!$&'()*+,;=%[]~"  # characters of a target that stand for themselves


class Endpoint:
    """One upstream's address, key and connections. It never follows redirects, and stores no cookies.

    Errors call it `name`, since they reach clients, which may not see the address; without a name, by its address.
    `address` is the one to connect to of those that the URL's host has. Connections belong to an event loop, so each
    loop has a pool of its own; the pool of a deleted loop is dropped. `failing`: its last call ended without an answer
    or with a status of 500 or more; None before any.
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
        self.calls = self.failures = self.in_flight = 0
        self.failing: bool | None = None

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
        added: Mapping[str, str] = NONE,
        probing: bool = False,
    ) -> AsyncIterator[UpstreamResponse]:
        """Send `body` and yield the answer once its headers have arrived; leaving the block closes the stream.

        Headers outside the allow-list are dropped, except those in `added`; the endpoint's own key replaces a given
        Authorization. `timeout` in seconds replaces the configured one for each phase; `above` means a path next to
        `/v1`, not below it. Failures are logged, those of a request that is `probing` at level DEBUG. Raises
        `UpstreamError` when nothing answers, and for a redirect, which would carry the key elsewhere.
        """
        sent = {"accept": "*/*", "user-agent": "agentspec"}
        sent |= allowed(headers.items(), REQUEST_HEADERS, REQUEST_PREFIXES) | {"accept-encoding": "identity"}
        if self._authorization is not None:
            sent = {key: value for key, value in sent.items() if key not in ACCOUNT_HEADERS}
            sent |= self._own_key(path, self._authorization)
        sent |= added
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in sent.items()]
        timeouts = self._timeouts if timeout is None else (timeout, timeout)
        self.calls, self.in_flight = self.calls + (not probing), self.in_flight + (not probing)
        answer: Answer | None = None
        failed: bool | None = None  # neither, if the caller leaves
        try:
            with mapped_errors(self.name):
                target = self._target(path, query, above=above)
                answer = await self._connections().send(method, target, encoded, body, timeouts)
            if answer.status >= 600:
                raise UpstreamError(f"upstream {self.name} answered {answer.status}, which is no status of HTTP")
            if not 200 <= answer.status < 300 and answer.status < 400:
                raise UpstreamError(f"upstream {self.name} answered {answer.status}; redirects are not followed")
            yield UpstreamResponse(answer, self.name, own_key=self.has_key)
            failed = answer.status >= 500
        except UpstreamError as error:
            failed = error.status >= 500
            if answer is None:
                logger.log(logging.DEBUG if probing else logging.INFO, "%s: %s", self._shown, error.message)
            raise
        finally:
            if not probing:
                self.in_flight, self.failures = self.in_flight - 1, self.failures + bool(failed)
                self.failing = self.failing if failed is None else failed
            if answer is not None:
                await answer.aclose()

    def _own_key(self, path: str, authorization: str) -> dict[str, str]:
        """The headers that carry the operator's key: on Anthropic's routes `x-api-key`, and at other hosts than its
        own a bearer as well.
        """
        scheme, _, key = authorization.partition(" ")
        if not path.startswith(MESSAGES) or scheme != "Bearer":
            return {"authorization": authorization}
        is_anthropics = f".{self._url.host}".endswith(ANTHROPIC)
        return {"x-api-key": key} | ({} if is_anthropics else {"authorization": authorization})

    async def fetch(
        self, method: str, path: str, *, body: bytes = b"", limit: int = MAX_ANSWER_BYTES, **options: Any
    ) -> bytes:
        """Send a JSON `body`; returns the whole answer. Takes the `options` of `send` and raises as it does, and
        `UpstreamStatusError` for an error.
        """
        headers = {"content-type": "application/json"} if body else {}
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

    def _connections(self) -> Connections:
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            for ended in [other for other in self._pools if other.is_closed()]:
                del self._pools[ended]  # a pool refers to its loop, so that it would never be freed
            pool = self._pools[loop] = open_connections(self._url, self._transport, self._address)
        return pool

    def _target(self, path: str, query: str, *, above: bool) -> bytes:
        base = self._base.removesuffix("/v1") if above else self._base
        return (base + quote(path, _SAFE) + ("?" + quote(query, _SAFE) if query else "")).encode()


def _authorization(settings: OpenAISettings, url: httpx.URL) -> str | None:
    """The header that carries the operator's key, or the user and password of the address."""
    if url.userinfo:
        given = f"{url.username}:{url.password}".encode()
        return f"Basic {base64.b64encode(given).decode()}"
    if settings.api_key is not None:
        key = sendable(settings.api_key.get_secret_value().strip(), "api_key")
    elif settings.api_key_file is not None:
        key = sendable(read_secret(settings.api_key_file, "api_key_file"), f"api_key_file {settings.api_key_file!r}")
    else:
        return None
    return f"Bearer {key}"
