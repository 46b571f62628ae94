"""What a connection makes of the bytes that a server sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from agentspec.backends.http.connections import HttpConnection, connect, httpcore

pytestmark = pytest.mark.anyio
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@asynccontextmanager
async def answered(*pieces: bytes, pause: float = 0.0, close: bool = False) -> AsyncIterator[HttpConnection]:
    """A connection whose server sends `pieces` after each request, a `pause` apart, and then may `close`."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(pause)
            if close:
                return

    async with connected(script) as connection:
        yield connection


@asynccontextmanager
async def connected(script: Callable[..., Awaitable[None]]) -> AsyncIterator[HttpConnection]:
    """A connection to a server that follows the script and then closes it."""
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await script(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 20)
    connection = await connect("127.0.0.1", server.sockets[0].getsockname()[1], None, 10.0)
    try:
        yield connection
    finally:
        connection.close()
        await ended.wait()
        server.close()


async def whole(connection: HttpConnection, timeout: float | None = 60.0) -> tuple[int, bytes]:
    connection.send(REQUEST, timeout)
    await connection.read_head()
    body = b""
    while piece := await connection.read():
        body += piece
    return connection.status, body


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: 1\r\n\r\nhello",
        CHUNKED + b"2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nx-a: trailer\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\nx-b: 2\r\n\r\n" + CHUNKED + b"5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
    ],
)
async def test_an_answer_cut_anywhere_is_read_and_the_connection_used_again(answer: bytes, cut: int) -> None:
    pieces = [answer[start : start + cut] for start in range(0, len(answer), cut)]
    async with answered(*pieces) as connection:
        for _ in range(2):
            assert await whole(connection) == (200, b"hello")
            assert {name for name, _ in connection.headers} <= {b"content-length", b"x-a", b"transfer-encoding"}
            assert connection.is_idle
        assert (b"x-a", b"trailer") not in connection.headers


async def test_an_empty_answer_leaves_the_connection_open() -> None:
    async with answered(b"HTTP/1.1 204 No Content\r\n\r\n") as connection:
        assert await whole(connection) == (204, b"") and connection.is_idle


async def test_each_wait_has_its_time_and_not_the_answer() -> None:
    pieces = [CHUNKED, *[b"1\r\nx\r\n"] * 8, b"0\r\n\r\n"]
    async with answered(*pieces, pause=0.1) as connection:
        assert await whole(connection, 0.6) == (200, b"x" * 8)
    async with answered(CHUNKED + b"1\r\nx\r\n") as connection:
        with pytest.raises(httpcore.ReadTimeout):
            await whole(connection, 0.1)


async def test_a_server_that_reads_a_long_request_slowly_is_not_late() -> None:
    body = bytes(16 << 20)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = len(body) + len(REQUEST)
        while left:
            left -= len(await reader.read(1 << 17))
            await asyncio.sleep(0.01)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await reader.read()

    async with connected(script) as connection:
        connection.send(REQUEST + body, 1.0)
        await connection.read_head()
        assert connection.status == 200


async def test_a_header_that_holds_a_line_end_is_not_sent() -> None:
    from agentspec.backends.http import Endpoint
    from agentspec.backends.settings import OpenAISettings
    from agentspec.errors import UpstreamError

    settings: dict[str, Any] = {"base_url": "http://127.0.0.1:9/v1"}  # where nobody listens
    endpoint = Endpoint(OpenAISettings(**settings))
    for value in ("a\r\nx-evil: 1", "a\nb", "a\rb", "a\0b"):
        with pytest.raises(UpstreamError, match="LocalProtocolError"):
            async with endpoint.send("GET", "/x", headers={"x-request-id": value}):
                pass
