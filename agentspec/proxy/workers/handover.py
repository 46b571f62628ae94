"""Hands accepted connections from the parent to the workers.

The parent keeps a connection until a worker says that it has it, so that a worker's end loses none that waits.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import orjson

from agentspec.proxy.serving.connections import Connections
from agentspec.proxy.serving.http_server import REFUSAL

_FILES = 32  # connections taken over at once
_BYTES = 16 << 10
_NOT_INHERITED = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


@dataclass(slots=True, eq=False)
class Recipient:
    """One worker as the parent sees it: where connections are sent, those that it has, and those on their way.

    `late`: it has said nothing for seconds, and gets connections only where all others are late, too.
    """

    way: socket.socket
    open: set[int] = field(default_factory=set)
    sent: dict[int, tuple[socket.socket, str]] = field(default_factory=dict)
    late: bool = False


class Handover:
    """Admits connections by `connections`, and gives each to the worker that has fewest."""

    def __init__(self, connections: Connections, *, secure: bool) -> None:
        self.connections = connections
        self._secure = secure
        self._recipients: list[Recipient] = []
        self._waiting: deque[tuple[int, socket.socket, str]] = deque()
        self._networks: dict[int, str] = {}
        self._number = 0

    def accepted(self, connection: socket.socket, address: str) -> None:
        """Refuse a new connection, or give it to a worker."""
        network = self.connections.admit(address)
        if network is None:
            with suppress(OSError):
                if not self._secure:
                    connection.send(REFUSAL)
            connection.close()
            return
        self._number += 1
        self._networks[self._number] = network
        self._waiting.append((self._number, connection, address))
        self._send_waiting()

    def join(self, recipient: Recipient) -> None:
        """Give connections to this worker from now on."""
        if recipient in self._recipients:
            return
        recipient.way.setblocking(False)
        self._recipients.append(recipient)
        self._send_waiting()

    def leave(self, recipient: Recipient) -> None:
        """Give this worker no more connections: it is about to end."""
        if recipient in self._recipients:
            self._recipients.remove(recipient)

    def ended(self, recipient: Recipient) -> None:
        """The worker is gone: what it had is closed, and what was on its way goes to another one."""
        self.leave(recipient)
        recipient.way.close()
        self.closed(recipient, tuple(recipient.open))
        self._waiting.extendleft((number, *given) for number, given in reversed(recipient.sent.items()))
        recipient.sent.clear()
        self._send_waiting()

    def opened(self, recipient: Recipient, numbers: Collection[int]) -> None:
        """The worker says that it has these connections."""
        for number in numbers:
            connection, _ = recipient.sent.pop(number)
            connection.close()
            recipient.open.add(number)
        self._send_waiting()

    def closed(self, recipient: Recipient, numbers: Collection[int]) -> None:
        """The worker says that these connections are closed."""
        for number in numbers:
            recipient.open.discard(number)
            self.connections.release(self._networks.pop(number))

    def close(self) -> None:
        """Close the connections that no worker has."""
        for recipient in tuple(self._recipients):
            self.leave(recipient)
            self._waiting.extend((number, *given) for number, given in recipient.sent.items())
            recipient.sent.clear()
        for _, connection, _ in self._waiting:
            connection.close()
        self._waiting.clear()

    def _send_waiting(self) -> None:
        while self._waiting:
            number, connection, address = self._waiting[0]
            # One that does not say what it has got is busy.
            order = sorted(self._recipients, key=lambda one: (one.late, len(one.sent), len(one.open)))
            if not any(_send(one, number, connection, address) for one in order):
                return
            self._waiting.popleft()


def _send(recipient: Recipient, number: int, connection: socket.socket, address: str) -> bool:
    line = orjson.dumps((number, address), option=orjson.OPT_APPEND_NEWLINE)
    try:
        socket.send_fds(recipient.way, [line], [connection.fileno()])
    except OSError:  # full, or gone
        return False
    recipient.sent[number] = (connection, address)
    return True


class HandedConnections:
    """Takes connections over in a worker, like a `Listener`. `taken(number, connection, address)` serves one, and
    `lost(number)` is told of one for which this process has no open file left.
    """

    def __init__(
        self,
        source: socket.socket,
        taken: Callable[[int, socket.socket, str], Coroutine[Any, Any, None] | None],
        lost: Callable[[int], None],
    ) -> None:
        source.setblocking(False)
        self._source = source
        self._taken, self._lost = taken, lost
        self._lines = b""
        self._files: deque[int] = deque()
        self._opening: set[asyncio.Future[None]] = set()

    async def start_serving(self) -> None:
        asyncio.get_running_loop().add_reader(self._source, self._read)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._source)
        for task in self._opening:
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _read(self) -> None:
        try:
            data, files, _, _ = socket.recv_fds(self._source, _BYTES, _FILES, _NOT_INHERITED)
        except OSError:
            return
        if not data:  # the parent is gone
            asyncio.get_running_loop().remove_reader(self._source)
        self._files.extend(files)
        *lines, self._lines = (self._lines + data).split(b"\n")
        for line in lines:
            number, address = orjson.loads(line)
            if not self._files:  # the system then drops the file and passes the line on
                self._lost(number)
                continue
            connection = socket.socket(fileno=self._files.popleft())
            connection.setblocking(False)
            opening = self._taken(number, connection, address)
            if opening is not None:
                task = asyncio.ensure_future(opening)
                self._opening.add(task)
                task.add_done_callback(self._opening.discard)
