"""Servers that speak HTTP badly or with ill will: a call ends with an answer or an error, in bounded memory."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress

import pytest

from agentspec.backends.http import Endpoint
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import UpstreamError

pytestmark = pytest.mark.anyio
OK = b"HTTP/1.1 200 OK\r\n"
WHOLE = OK + b"content-length: 2\r\n\r\n{}"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


async def each(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


@asynccontextmanager
async def answering(
    pieces: Iterable[bytes] | AsyncIterator[bytes], read_timeout: float = 5.0
) -> AsyncIterator[Endpoint]:
    """An endpoint whose server sends `pieces` in answer to every request, and then closes the connection."""
    left: list[asyncio.Task[None] | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left.append(asyncio.current_task())
        try:
            await reader.readuntil(b"\r\n\r\n")
            async for piece in pieces if isinstance(pieces, AsyncIterator) else each(pieces):
                writer.write(piece)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    endpoint = Endpoint(OpenAISettings(base_url=url, read_timeout=read_timeout))  # type: ignore[arg-type]
    try:
        yield endpoint
    finally:
        await endpoint.aclose()
        server.close()
        await asyncio.gather(*(task for task in left if task is not None), return_exceptions=True)


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        b"\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"\x16\x03\x01\x02\x00\x01" * 100,
        b"HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 99999999999999999999 OK\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\nbytes",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 200",
        OK + b"content-length: -1\r\n\r\n{}",
        OK + b"content-length: x\r\n\r\n{}",
        OK + b"content-length: 99999999999999999999999\r\n\r\n{}",
        OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}x",
        OK + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        OK + b"content-length: 5\r\n\r\n{}",
        OK + b"no colon\r\n\r\n",
        OK + b"a\0b: c\r\ncontent-length: 2\r\n\r\n{}",
        CHUNKED + b"2\r\n{}\r\n",
        CHUNKED + b"ffffffffffffffffff\r\n{}\r\n0\r\n\r\n",
        CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n",
        CHUNKED + b"2\r\n{}garbage\r\n0\r\n\r\n",
        CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nlocation: http://169.254.169.254/\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\n\r\n",
    ],
)
async def test_what_is_no_answer_is_an_error(wire: bytes) -> None:
    async with answering([wire]) as endpoint:
        for _ in range(2):
            with pytest.raises(UpstreamError):
                await endpoint.fetch("GET", "/x")


@pytest.mark.parametrize(
    "wire",
    [
        WHOLE,
        b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + WHOLE,
        OK + b"connection: close\r\n\r\n{}",
        b"HTTP/1.0 200 OK\r\n\r\n{}",
        CHUNKED + b"1;name=value\r\n{\r\n01\r\n}\r\n0\r\ntrailer: x\r\n\r\n",
        WHOLE + WHOLE.replace(b"{}", b"[]"),
        CHUNKED + b"2\r\n{}\r\n0\r\n\r\n" + WHOLE.replace(b"{}", b"[]"),
        WHOLE + b"\0garbage",
    ],
)
async def test_what_is_odd_but_clear_is_an_answer(wire: bytes) -> None:
    """A second answer that nobody asked for is not the next call's."""
    async with answering([wire]) as endpoint:
        for _ in range(3):
            assert await endpoint.fetch("GET", "/x") == b"{}"


async def test_mutated_answers_hang_and_break_nothing() -> None:
    chance = random.Random(7)
    for _ in range(300):
        wire = bytearray(chance.choice((WHOLE, CHUNKED + b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n")))
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(wire))
            wire[at : at + chance.randint(0, 2)] = bytes(chance.choices(b"\r\n\0 :;0fX\xff", k=chance.randint(0, 3)))
        async with answering([bytes(wire[:at]), bytes(wire[at:])]) as endpoint:
            with suppress(UpstreamError):
                await endpoint.fetch("GET", "/x")


@pytest.mark.parametrize(
    "piece",
    [b"x-name: " + b"v" * 65000 + b"\r\n", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 2000, b"v" * 65536, b"a:\r\n" * 16384],
    ids=["headers", "hints", "one header", "many headers"],
)
async def test_a_head_without_end_is_not_kept(piece: bytes) -> None:
    head = [] if piece.startswith(b"HTTP") else [OK, b"x-name: "]
    async with answering([*head, *[piece] * 2000]) as endpoint:
        tracemalloc.start()
        try:
            with pytest.raises(UpstreamError):
                await endpoint.fetch("GET", "/x")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 16 << 20


async def test_trailers_without_end_are_not_kept() -> None:
    trailers = [b"x-name: " + b"v" * 65000 + b"\r\n"] * 1000
    async with answering([CHUNKED + b"2\r\n{}\r\n0\r\n", *trailers], read_timeout=60) as endpoint:
        tracemalloc.start()
        try:
            with pytest.raises(UpstreamError):
                await endpoint.fetch("GET", "/x")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 8 << 20


async def drip() -> AsyncIterator[bytes]:
    yield OK
    while True:
        await asyncio.sleep(0.05)
        yield b"a: b\r\n"


async def test_a_head_that_drips_is_not_waited_for_for_ever() -> None:
    """What counts is the time until the head is there, not the time between its bytes."""
    async with answering(drip(), read_timeout=0.5) as endpoint, asyncio.timeout(60):
        with pytest.raises(UpstreamError, match="in time"):
            await endpoint.fetch("GET", "/x")
