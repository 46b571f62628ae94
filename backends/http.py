"""The HTTP client: the only module that imports httpx, so that another client is a change in one place."""

from __future__ import annotations

import asyncio
import contextlib
import json
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from agentspec.backends.settings import OpenAISettings
from agentspec.errors import ConfigurationError, UpstreamError, UpstreamStatusError, UpstreamTimeoutError

Transport = httpx.AsyncBaseTransport
MAX_ANSWER_BYTES = 64 << 20

# Headers that may be forwarded with a request or an answer. Hop-by-hop headers, cookies and hosts are not among them.
REQUEST_HEADERS = frozenset({"accept", "authorization", "content-type", "idempotency-key", "user-agent"})
REQUEST_PREFIXES = ("openai-", "trace", "x-agentspec-", "x-request-id", "x-stainless-")
RESPONSE_HEADERS = frozenset({"content-type", "retry-after", "retry-after-ms", "x-should-retry"})
RESPONSE_PREFIXES = ("openai-", "x-agentspec-", "x-ratelimit-", "x-request-id")


class UpstreamResponse:
    """An upstream's answer while it arrives: `status`, the allowed `headers` (lower case) and the body in pieces."""

    def __init__(self, response: httpx.Response, name: str) -> None:
        self.status = response.status_code
        self.headers = _allowed(response.headers, RESPONSE_HEADERS, RESPONSE_PREFIXES)
        self._response = response
        self._name = name

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").lower().startswith("text/event-stream")

    async def aiter_raw(self) -> AsyncGenerator[bytes]:
        """The body's bytes exactly as the upstream sent them. Raises `UpstreamError` if the body breaks off."""
        with mapped_errors(self._name):
            async for chunk in self._response.aiter_raw():
                yield chunk

    async def aread(self, limit: int = MAX_ANSWER_BYTES) -> bytes:
        """The whole body. Raises `UpstreamError` if it breaks off or is longer than `limit` bytes."""
        body = bytearray()
        async with aclosing(self.aiter_raw()) as chunks:
            async for chunk in chunks:
                body += chunk
                if len(body) > limit:
                    raise UpstreamError(f"upstream {self._name} answered with more than {limit} bytes")
        return bytes(body)


class Endpoint:
    """One upstream's address, key and connections. It never follows redirects.

    Connections belong to an event loop, so each running loop has its own pool; the pool of a deleted loop is dropped.
    """

    def __init__(self, settings: OpenAISettings, *, transport: Transport | None = None) -> None:
        self._url = httpx.URL(str(settings.base_url).rstrip("/"))
        self._key = _api_key(settings)
        self._timeout = httpx.Timeout(settings.read_timeout, connect=settings.connect_timeout)
        self._transport = transport
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient]
        self._clients = weakref.WeakKeyDictionary()
        self.name = str(self._url.copy_with(username=None, password=None, query=None))

    @property
    def has_key(self) -> bool:
        return self._key is not None

    def __repr__(self) -> str:
        return f"Endpoint({self.name!r}, api_key={'set' if self.has_key else 'none'})"

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
    ) -> AsyncIterator[UpstreamResponse]:
        """Send `body` and yield the answer once its headers have arrived; leaving the block closes the stream.

        Headers outside the allow-list are dropped; the endpoint's own key replaces a given Authorization. `timeout`
        in seconds replaces the configured one for each phase; `above` means a path beside `/v1`, not below. Raises
        `UpstreamError` when nothing answers, and for a redirect, which would carry the key elsewhere.
        """
        base = self._url.path.rstrip("/")
        url = self._url.copy_with(
            path=(base.removesuffix("/v1") if above else base) + path, query=query.encode() or None
        )
        sent = _allowed(headers, REQUEST_HEADERS, REQUEST_PREFIXES) | {"accept-encoding": "identity"}
        if self._key is not None:
            sent["authorization"] = f"Bearer {self._key}"
        raw = httpx.Headers(sent, encoding="latin-1")  # bytes above ASCII travel on as they came
        client = self._client()
        with mapped_errors(self.name):
            request = client.build_request(
                method, url, headers=raw, content=body, timeout=self._timeout if timeout is None else timeout
            )
            response = await client.send(request, stream=True)
        try:
            if not 200 <= response.status_code < 300 and response.status_code < 400:
                raise UpstreamError(f"upstream {self.name} answered {response.status_code}; redirects are not followed")
            yield UpstreamResponse(response, self.name)
        finally:
            await response.aclose()

    async def fetch(
        self,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        timeout: float | None = None,
        above: bool = False,
        limit: int = MAX_ANSWER_BYTES,
    ) -> bytes:
        """Send a JSON `body`; returns the whole answer. Raises as `send`, and `UpstreamStatusError` for an error."""
        headers = {"content-type": "application/json"} if body else {}
        async with self.send(method, path, headers=headers, body=body, timeout=timeout, above=above) as response:
            content = await response.aread(limit)
            if response.status >= 400:
                raise status_error(self.name, response.status, content, response.headers)
            return content

    async def aclose(self) -> None:
        """Close the connections of the running loop and drop those of other loops. Idempotent."""
        await self.leave_loop()
        self._clients.clear()

    async def leave_loop(self) -> None:
        """Close the connections of the running loop only, before the loop ends. Idempotent."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    def _client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            self._clients[loop] = httpx.AsyncClient(
                follow_redirects=False, limits=limits, transport=self._transport, headers={"user-agent": "agentspec"}
            )
        return self._clients[loop]


@contextlib.contextmanager
def mapped_errors(name: str) -> Iterator[None]:
    """Turn every error of the HTTP client into an `UpstreamError`, keeping the original as its cause."""
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL, httpx.CookieConflict, httpx.StreamError) as error:
        raise map_error(error, name) from error


def map_error(error: Exception, name: str) -> UpstreamError:
    kind = UpstreamTimeoutError if isinstance(error, httpx.TimeoutException) else UpstreamError
    verb = "did not answer in time" if kind is UpstreamTimeoutError else "could not be reached or broke off"
    return kind(f"upstream {name} {verb} ({type(error).__name__})")


def status_error(name: str, status: int, body: bytes, headers: Mapping[str, str]) -> UpstreamStatusError:
    """The exception for an upstream's error answer: it keeps the whole answer and quotes its message, if any."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError, RecursionError):
        message = None
    text = f"upstream {name} answered {status}" + (f": {message[:2000]}" if isinstance(message, str) else "")
    return UpstreamStatusError(text, status=status, body=body, headers=headers)


def _allowed(headers: Mapping[str, str], names: frozenset[str], prefixes: tuple[str, ...]) -> dict[str, str]:
    lower = ((name.lower(), value) for name, value in headers.items())
    return {name: value for name, value in lower if name in names or name.startswith(prefixes)}


def _api_key(settings: OpenAISettings) -> str | None:
    if settings.api_key is not None:
        return settings.api_key.get_secret_value().strip()
    if settings.api_key_file is None:
        return None
    try:
        return Path(settings.api_key_file).expanduser().read_text().strip()
    except OSError as error:
        raise ConfigurationError(f"cannot read api_key_file {settings.api_key_file!r}: {error.strerror}") from None


def decode_json(body: bytes, name: str) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise UpstreamError(f"upstream {name} answered with something that is not JSON") from None
