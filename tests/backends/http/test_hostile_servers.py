"""Servers that speak HTTP badly or with ill will: a call ends with an answer or an error, in bounded memory."""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from itertools import chain, repeat
from typing import Any

import pytest

from agentspec.errors import UpstreamError
from tests.backends.http.conftest import Client, ask, serving

OK = b"HTTP/1.1 200 OK\r\n"
WHOLE = OK + b"content-length: 2\r\n\r\n{}"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def answering(pieces: Iterable[bytes], pause: float = 0.0, read_timeout: float = 5.0) -> AsyncIterator[Any]:
    """A function that asks a server which sends `pieces` in answer to every request and then closes the connection."""

    async def script(client: Client) -> None:
        await client.request()
        for piece in pieces:
            await asyncio.sleep(pause)
            await client.send(piece)

    async with serving(script, read_timeout=read_timeout) as (_, backend):
        yield lambda: ask(backend)


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
async def test_a_malformed_answer_is_an_error(wire: bytes) -> None:
    async with answering([wire]) as asked:
        for _ in range(2):
            with pytest.raises(UpstreamError):
                await asked()


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
async def test_an_unusual_but_valid_answer_is_read(wire: bytes) -> None:
    """A second answer to one request is not the next call's."""
    async with answering([wire]) as asked:
        for _ in range(3):
            assert await asked() == b"{}"


async def test_mutated_answers_neither_hang_nor_crash() -> None:
    chance = random.Random(7)
    for _ in range(300):
        wire = bytearray(chance.choice((WHOLE, CHUNKED + b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n")))
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(wire))
            wire[at : at + chance.randint(0, 2)] = bytes(chance.choices(b"\r\n\0 :;0fX\xff", k=chance.randint(0, 3)))
        async with answering([bytes(wire[:at]), bytes(wire[at:])]) as asked:
            with suppress(UpstreamError):
                await asked()


LINE = b"x-name: " + b"v" * 65000 + b"\r\n"
ENDLESS: dict[str, Iterable[bytes]] = {
    "headers": (OK, *[LINE] * 2000),
    "hints": [b"HTTP/1.1 103 Early Hints\r\n\r\n" * 2000] * 2000,
    "one header": (OK, b"x-name: ", *[b"v" * 65536] * 2000),
    "many headers": (OK, *[b"a:\r\n" * 16384] * 2000),
    "trailers": (CHUNKED + b"2\r\n{}\r\n0\r\n", *[LINE] * 1000),
}


@pytest.mark.parametrize("pieces", ENDLESS.values(), ids=ENDLESS)
async def test_an_endless_head_or_trailer_is_refused_in_bounded_memory(pieces: Iterable[bytes]) -> None:
    async with answering(pieces, read_timeout=60) as asked:
        tracemalloc.start()
        try:
            with pytest.raises(UpstreamError):
                await asked()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 16 << 20


async def test_a_head_that_arrives_slowly_times_out() -> None:
    """The time until the head has arrived counts, not the time between its bytes."""
    async with answering(chain([OK], repeat(b"a: b\r\n", 1000)), pause=0.5, read_timeout=5) as asked:
        with pytest.raises(UpstreamError, match="in time"):
            await asked()
        assert asyncio.get_running_loop().time() < 60
