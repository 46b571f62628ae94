"""Servers on real sockets in a loop whose clock jumps: no test waits, and none depends on how busy the machine is."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from agentspec.backends.openai import OpenAIBackend
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import UpstreamError
from tests.conftest import JumpingLoop, JumpingSelector, running_in

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


class PatientSelector(JumpingSelector):
    """Gives the kernel time to deliver what was sent before the clock jumps."""

    def select(self, timeout: float | None = None) -> Any:
        ready = super(JumpingSelector, self).select(min(timeout or 0.0, 0.05))
        return ready or super().select(timeout)


class PatientLoop(JumpingLoop):
    def __init__(self) -> None:
        self.clock = PatientSelector()
        asyncio.SelectorEventLoop.__init__(self, self.clock)


class Client:
    """The server's side of a connection. `number` counts connections from 0."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number, self.reader, self.writer = number, reader, writer
        self.requests = 0

    async def request(self) -> bytes:
        """The head of the next request, whose body is read, too; `IncompleteReadError` if the client has left."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        self.requests += 1
        _, found, length = head.lower().partition(b"content-length: ")
        if found:
            await self.reader.readexactly(int(length.split(b"\r\n")[0]))
        return head

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        """Close with RST, as a server does that was killed."""
        linger = (1).to_bytes(4, sys.byteorder) + bytes(4)
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.close()

    async def left(self) -> None:
        """Wait until the client has left."""
        while await self.reader.read(1 << 16):
            pass


Script = Callable[[Client], Awaitable[None]]


class Server:
    def __init__(self, script: Script) -> None:
        self.script = script
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
            await self.script(client)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def serving(script: Script, **settings: Any) -> AsyncIterator[tuple[Server, OpenAIBackend]]:
    handler = Server(script)
    server = await asyncio.start_server(handler, "127.0.0.1", 0, backlog=2048, limit=1 << 20)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    backend = OpenAIBackend(OpenAISettings(base_url=url, server_kind="other", **settings))  # type: ignore[arg-type]
    try:
        yield handler, backend
    finally:
        await backend.aclose()
        server.close()
        await until(lambda: not handler.open)


async def until(condition: Callable[[], object]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("waited in vain")


async def ask(backend: OpenAIBackend, body: bytes = b"{}", headers: dict[str, str] | None = None) -> bytes:
    """The whole answer to a POST. Raises `UpstreamError`."""
    async with backend.forward("POST", "/x", headers=headers or {}, body=body) as response:
        if response.status >= 400:
            raise UpstreamError(f"status {response.status}")
        return await response.aread()


pytest_pyfunc_call = running_in(PatientLoop)
