"""Listening sockets, and accepting connections on them before anything else is spent on a client."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Protocol

from agentspec.errors import ConfigurationError
from agentspec.proxy.logs import logger
from agentspec.settings.server import ServerSettings

BACKLOG = 2048
BURST = 32  # connections accepted before the loop does other work
KERNEL_BUFFER = 64 << 10  # bytes that the kernel keeps unsent for a client that does not read
OTHER_FILES = 128  # besides connections and upstream calls: logs, the index, model files
_SHORTAGE = 0.1  # seconds until the next try where descriptors or memory ran out


def listen(host: str, port: int) -> list[socket.socket]:
    """Bind to every address of `host`. Raises `ConfigurationError` if that cannot be done."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((family, address) for family, *_, address in found):
            bound = sockets[0].getsockname()[1] if sockets else port  # port 0: all addresses get the same
            name = (address[0], bound, *address[2:])
            sockets.append(socket.create_server(name, family=family, backlog=BACKLOG))
    except (OSError, UnicodeError) as error:
        for opened in sockets:
            opened.close()
        raise ConfigurationError(f"cannot listen on {host}:{port}: {_advice(error)}") from None
    return sockets


def _advice(error: OSError | UnicodeError) -> str:
    match getattr(error, "errno", None):
        case errno.EADDRINUSE:
            return "another process has this port; choose another one, or end that process"
        case errno.EACCES:
            return "this user may not have this port; choose one above 1023"
        case _:
            return "it is no address of this machine; choose another host"


def connection_capacity(settings: ServerSettings) -> int:
    """How many connections the process can hold at once. Raises its limit of open files as far as that is allowed, and
    logs a warning if that leaves fewer than configured.
    """
    reserved = settings.max_concurrent + OTHER_FILES
    wanted = settings.max_connections + reserved
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < wanted:
        soft = wanted if hard == unlimited else min(wanted, hard)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    capacity = settings.max_connections if soft == unlimited else min(settings.max_connections, soft - reserved)
    capacity = max(capacity, 16)
    if capacity < settings.max_connections:
        wanted = settings.max_connections
        logger.warning("fewer connections than configured", connections=capacity, open_files=soft, wanted=wanted)
    return capacity


class AcceptsConnections(Protocol):
    """Something that hands connections to a server, until it is closed."""

    async def start_serving(self) -> None: ...

    def close(self) -> None: ...

    async def wait_closed(self) -> None: ...


class Listener:
    """Accepts on `sockets` until closed and calls `accepted(connection, address)` for each connection."""

    def __init__(
        self, sockets: Sequence[socket.socket], accepted: Callable[[socket.socket, str], Awaitable[None] | None]
    ) -> None:
        self._sockets = sockets
        self._accepted = accepted
        self._accepting: list[asyncio.Task[None]] = []
        self._opening: set[asyncio.Future[None]] = set()

    async def start_serving(self) -> None:
        for listening in self._sockets:
            listening.listen(BACKLOG)
            listening.setblocking(False)
            self._accepting.append(asyncio.create_task(self._accept(listening)))

    def close(self) -> None:
        for task in (*self._accepting, *self._opening):
            task.cancel()
        for listening in self._sockets:
            asyncio.get_running_loop().call_soon(listening.close)  # after the tasks let go of them

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._accepting, *self._opening, return_exceptions=True)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        accepted = 0
        while True:
            try:
                connection, address = await loop.sock_accept(listening)
            except ConnectionAbortedError:  # the client is gone already
                continue
            except OSError:  # descriptors or memory ran out
                await asyncio.sleep(_SHORTAGE)
                continue
            _set_options(connection)
            opening = self._accepted(connection, address[0] if address else "")  # Unix sockets have no addresses
            if opening is not None:
                task = asyncio.ensure_future(opening)
                self._opening.add(task)
                task.add_done_callback(self._opening.discard)
            accepted += 1
            if accepted % BURST == 0:
                await asyncio.sleep(0)


def _set_options(connection: socket.socket) -> None:
    with suppress(OSError):  # a UNIX socket has none of these, a closed one none at all
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, KERNEL_BUFFER)
