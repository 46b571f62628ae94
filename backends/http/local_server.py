"""A server of this machine, behind a Unix socket."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from agentspec.backends.http.connections import ConnectionPool, OutgoingRequest, RawAnswer
from agentspec.backends.http.failures import mapped_errors
from agentspec.backends.http.library import httpx

CONNECT_SECONDS = 5.0
IDLE_SECONDS = 60.0


class LocalServer:
    """The connections to the server whose Unix socket is at `path`. Use it in one event loop."""

    def __init__(self, path: Path) -> None:
        self._connections = ConnectionPool(httpx.URL("http://localhost"), IDLE_SECONDS, str(path))

    @asynccontextmanager
    async def post(self, target: str, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> AsyncIterator[RawAnswer]:
        """Send `body` and yield the answer once its head is there; leaving the block cancels the server's work.

        Raises `UpstreamError` if nothing answers.
        """
        url = httpx.URL("http://localhost" + target)
        request = OutgoingRequest("POST", url, list(headers), body, CONNECT_SECONDS, None)
        with mapped_errors("local engine"):
            answer = await self._connections.send(request)
        try:
            yield answer
        finally:
            await answer.aclose()


async def pieces_of(answer: RawAnswer) -> AsyncGenerator[bytes]:
    """The body's bytes as they come. Raises `UpstreamError` if it breaks off."""
    with mapped_errors("local engine"):
        async for piece in answer:
            yield piece
