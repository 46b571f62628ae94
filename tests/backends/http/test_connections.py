"""Connections to one server: which are used again, when they are closed, and what a broken one means for a call."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentspec.backends.http import Endpoint
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import UpstreamError, UpstreamTimeoutError

pytestmark = pytest.mark.anyio
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
BEGUN = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
Script = Callable[["Client"], Awaitable[None]]


class Client:
    """The server's side of a connection. `number` counts connections from 0."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number, self._reader, self._writer = number, reader, writer
        self.requests = 0

    async def request(self) -> bytes:
        """The next request's body; raises `IncompleteReadError` if the client has left."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        self.requests += 1
        _, found, length = head.partition(b"content-length: ")
        return await self._reader.readexactly(int(length.split(b"\r\n")[0])) if found else b""

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def reset(self) -> None:
        """Close with RST, as a server does that was killed."""
        linger = (1).to_bytes(4, sys.byteorder) + bytes(4)
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._writer.close()

    async def left(self) -> None:
        """Wait until the client has left."""
        while await self._reader.read(1024):
            pass


class Server:
    def __init__(self, script: Script) -> None:
        self._script = script
        self.clients: list[Client] = []
        self.open = 0

    @property
    def requests(self) -> int:
        return sum(client.requests for client in self.clients)

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = Client(len(self.clients), reader, writer)
        self.clients.append(client)
        self.open += 1
        try:
            await self._script(client)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def serving(script: Script, **settings: Any) -> AsyncIterator[tuple[Server, Endpoint]]:
    handler = Server(script)
    server = await asyncio.start_server(handler, "127.0.0.1", 0, backlog=2048)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    endpoint = Endpoint(OpenAISettings(base_url=url, **settings))  # type: ignore[arg-type]
    try:
        yield handler, endpoint
    finally:
        await endpoint.aclose()
        server.close()
        await until(lambda: not handler.open)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def answer_all(client: Client) -> None:
    while True:
        await client.request()
        await client.send(ANSWER)


async def stream_for_ever(client: Client) -> None:
    await client.request()
    await client.send(BEGUN)
    await client.left()


async def test_the_connection_used_last_is_used_next() -> None:
    async with serving(answer_all) as (server, endpoint):
        for _ in range(5):
            assert await endpoint.fetch("POST", "/x", body=b"{}") == b"{}"
        await asyncio.gather(*(endpoint.fetch("POST", "/x", body=b"{}") for _ in range(3)))
        used = len(server.clients)
        for _ in range(5):
            await endpoint.fetch("POST", "/x", body=b"{}")
        assert len(server.clients) == used <= 3 and server.requests == 13


async def test_an_answer_that_was_not_read_to_its_end_ends_its_connection() -> None:
    async with serving(stream_for_ever) as (server, endpoint):
        async with endpoint.send("POST", "/x", headers={}, body=b"{}"):
            assert server.open == 1
        await until(lambda: server.open == 0)


async def test_idle_connections_are_closed_in_time_and_not_kept_for_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentspec.backends.http.endpoint.KEEPALIVE_SECONDS", 0.05)
    async with serving(answer_all) as (server, endpoint):
        await asyncio.gather(*(endpoint.fetch("GET", "/x") for _ in range(5)))
        await until(lambda: server.open == 0)
        assert await endpoint.fetch("GET", "/x") == b"{}"


async def test_what_a_server_says_unasked_is_no_answer() -> None:
    """Some servers send 408 before they close an idle connection."""
    said = asyncio.Event()

    async def script(client: Client) -> None:
        while True:
            await client.request()
            await client.send(ANSWER)
            if client.number == 0:
                await said.wait()
                await client.send(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")

    async with serving(script) as (server, endpoint):
        assert await endpoint.fetch("POST", "/x", body=b"{}") == b"{}"
        said.set()
        pool: Any = endpoint._connections()
        await until(lambda: not pool._idle[0].is_idle)
        assert await endpoint.fetch("POST", "/x", body=b"{}") == b"{}"
        assert len(server.clients) == 2


@pytest.mark.parametrize("by_reset", [False, True])
async def test_idle_connections_that_close_at_random_fail_no_call(by_reset: bool) -> None:
    """A server that closes at the moment when a request is under way has not read it: it goes to a new connection."""
    chance = random.Random(5)

    async def script(client: Client) -> None:
        while True:
            await client.request()
            if client.requests > 1 and chance.random() < 0.4:
                if by_reset:
                    client.reset()
                return
            await client.send(ANSWER)

    async with serving(script) as (server, endpoint):
        for _ in range(400):
            assert await endpoint.fetch("POST", "/x", body=b"{}") == b"{}"
        lost = server.requests - 400
        assert lost > 50 and len(server.clients) == lost + 1


async def test_a_request_is_sent_again_only_once() -> None:
    async def script(client: Client) -> None:
        await client.request()
        if client.number == 0:
            await client.send(ANSWER)
            await client.request()

    async with serving(script) as (server, endpoint):
        await endpoint.fetch("POST", "/x", body=b"{}")
        with pytest.raises(UpstreamError):
            await endpoint.fetch("POST", "/x", body=b"{}")
        assert server.requests == 3


async def test_a_new_connection_that_breaks_is_not_tried_again() -> None:
    async def script(client: Client) -> None:
        await client.request()

    async with serving(script) as (server, endpoint):
        with pytest.raises(UpstreamError):
            await endpoint.fetch("POST", "/x", body=b"{}")
        assert server.requests == 1


@pytest.mark.parametrize("begun", [b"H", ANSWER[:20], ANSWER[:-1]])
async def test_nothing_is_sent_again_after_a_byte_of_the_answer(begun: bytes) -> None:
    async def script(client: Client) -> None:
        await client.request()
        await client.send(ANSWER)
        await client.request()
        await client.send(begun)

    async with serving(script) as (server, endpoint):
        await endpoint.fetch("POST", "/x", body=b"{}")
        with pytest.raises(UpstreamError):
            await endpoint.fetch("POST", "/x", body=b"{}")
        assert server.requests == 2


async def test_a_late_answer_is_not_asked_for_again() -> None:
    async def script(client: Client) -> None:
        await client.request()
        await client.send(ANSWER)
        await client.request()
        await client.left()

    async with serving(script, read_timeout=0.2) as (server, endpoint):
        await endpoint.fetch("POST", "/x", body=b"{}", timeout=60)
        with pytest.raises(UpstreamTimeoutError):
            await endpoint.fetch("POST", "/x", body=b"{}")
        assert server.requests == 2


async def test_each_call_on_a_connection_has_its_own_time_limit() -> None:
    async def script(client: Client) -> None:
        await client.request()
        await client.send(ANSWER)
        await client.request()
        await client.left()

    async with serving(script, read_timeout=600) as (server, endpoint), asyncio.timeout(60):
        await endpoint.fetch("POST", "/x", body=b"{}")
        with pytest.raises(UpstreamTimeoutError):
            await endpoint.fetch("POST", "/x", body=b"{}", timeout=0.2)
        assert len(server.clients) == 1


async def test_an_early_answer_counts_although_the_request_was_not_read() -> None:
    """A server may refuse a large body before it has read it, and close."""

    async def script(client: Client) -> None:
        await client.send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await asyncio.sleep(0.05)

    async with (
        serving(script) as (_, endpoint),
        endpoint.send("POST", "/x", headers={}, body=b"x" * (8 << 20)) as response,
    ):
        assert response.status == 413


async def test_an_upstream_waits_while_its_answer_is_not_read() -> None:
    sent = 0

    async def script(client: Client) -> None:
        nonlocal sent
        await client.request()
        await client.send(BEGUN)
        for _ in range(4096):
            await client.send(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
            sent += 1

    async with serving(script) as (_, endpoint), endpoint.send("POST", "/x", headers={}, body=b"{}") as response:
        assert response.status == 200
        last = -1
        while last != sent:
            last = sent
            await asyncio.sleep(0.2)
        assert sent < 512, "32 MiB: what the kernel and the client hold"


async def test_a_server_whose_certificate_nobody_trusts_and_one_that_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    files = ["-keyout", str(key), "-out", str(certificate), "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    handler = Server(answer_all)
    server = await asyncio.start_server(handler, "localhost", 0, ssl=context)
    url = f"https://localhost:{server.sockets[0].getsockname()[1]}/v1"
    stranger = Endpoint(OpenAISettings(base_url=url))  # type: ignore[arg-type]
    with pytest.raises(UpstreamError, match=r"ConnectError\): its certificate is not trusted") as raised:
        await stranger.fetch("GET", "/models")
    assert raised.value.retryable
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    known = Endpoint(OpenAISettings(base_url=url))  # type: ignore[arg-type]
    assert [await known.fetch("GET", "/models") for _ in range(3)] == [b"{}"] * 3
    assert sum(client.requests for client in handler.clients) == 3 and handler.open == 1
    await known.aclose()
    server.close()
    await until(lambda: not handler.open)


async def test_a_proxy_that_the_environment_names_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    async def script(client: Client) -> None:
        seen.append(await client._reader.readuntil(b"\r\n\r\n"))
        await client.send(ANSWER)

    server = await asyncio.start_server(Server(script), "127.0.0.1", 0)
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    endpoint = Endpoint(OpenAISettings(base_url="http://upstream.test/v1"))  # type: ignore[arg-type]
    assert await endpoint.fetch("GET", "/models") == b"{}"
    assert seen[0].startswith(b"GET http://upstream.test/v1/models HTTP/1.1\r\n")
    await endpoint.aclose()
    server.close()


def test_httpx_takes_the_place_of_httpx2() -> None:
    code = """
import asyncio, sys
sys.modules["httpx2"] = sys.modules["httpcore2"] = None
from agentspec.backends.http import Endpoint, httpx
from agentspec.backends.settings import OpenAISettings

async def main():
    async def answer(reader, writer):
        for _ in range(2):
            await reader.readuntil(b"\\r\\n\\r\\n")
            writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\n{}")
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    endpoint = Endpoint(OpenAISettings(base_url=f"http://127.0.0.1:{port}/v1"))
    print(httpx.__name__, await endpoint.fetch("GET", "/a"), await endpoint.fetch("GET", "/b"))
    await endpoint.aclose()

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "httpx b'{}' b'{}'\n"
