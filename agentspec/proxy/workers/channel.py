"""Messages between the parent and another process of the gateway: lines of JSON over a socket pair."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

import orjson

Message = list[Any]
"""The message's name, and what it tells."""


class Channel(asyncio.Protocol):
    """One end. `received` is called with each message, `closed` once the other end is gone.

    Messages of one turn of the loop are written together.
    """

    def __init__(self, received: Callable[[Message], None], closed: Callable[[], None]) -> None:
        self._received = received
        self._closed = closed
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._waiting: list[bytes] = []
        self.sent = 0  # messages

    async def open(self, connection: socket.socket) -> None:
        """Begin to read and write on this end of the pair."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connection)

    def send(self, *message: Any) -> None:
        """Send a message; dropped if the other end is gone."""
        self.sent += 1
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append(orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE))

    def flush(self) -> None:
        """Write now what was sent."""
        waiting, self._waiting = self._waiting, []
        if waiting and self._transport is not None:
            self._transport.write(b"".join(waiting))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._received(orjson.loads(line))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._closed()
