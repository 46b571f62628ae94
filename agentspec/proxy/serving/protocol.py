"""uvicorn's HTTP/1.1 protocol, made to tell what a connection waits for and to bound what it takes and buffers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl

from agentspec.errors import AgentSpecError, InvalidRequestError
from agentspec.protocol.responses import encode

WRITE_BUFFER = 32 << 10  # bytes: writing pauses above it
PIECE = 31 << 10  # bytes: so that a full buffer, a piece and its frame stay within 64 KiB


class Phase(Enum):
    """What a connection waits for: a first byte, the rest of a head or of a body, or the end of the answer."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    ANSWER = "answer"


class BoundedConnection(asyncio.Protocol):
    """Goes before uvicorn's HTTP protocol, whose attributes it reads.

    `received` counts bytes. `on_close` is called once when the connection is lost.
    """

    transport: asyncio.Transport
    flow: FlowControl
    timeout_keep_alive_task: asyncio.TimerHandle | None
    cycle: Any  # uvicorn's state of one request and its response
    received = 0
    on_close: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.set_write_buffer_limits(high=WRITE_BUFFER)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.abandon()

    def abandon(self) -> None:
        """Report once that the connection is over, also if it was never made."""
        if self.on_close is not None:
            self.on_close()
            self.on_close = None

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        super().data_received(data)

    def on_response_complete(self) -> None:
        """Called by uvicorn. A body that nobody read would stay as long as the connection is idle."""
        self.cycle.body = bytearray()
        super().on_response_complete()  # type: ignore[misc]

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what is not HTTP. Behind a whole request it is dropped, and the answer is the last."""
        if self.phase is Phase.ANSWER:
            self.cycle.keep_alive = False
            return
        self.refuse(InvalidRequestError("this is not a valid HTTP/1.1 request"))

    @property
    def phase(self) -> Phase:
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return Phase.HEAD if self.timeout_keep_alive_task is None else Phase.IDLE
        # A client that waits for "100 Continue" sends nothing before the application wants its body.
        return Phase.BODY if cycle.more_body and not cycle.waiting_for_100_continue else Phase.ANSWER

    @property
    def unsent(self) -> int:
        """Bytes that the socket has not taken yet."""
        return self.transport.get_write_buffer_size()

    def refuse(self, error: AgentSpecError) -> None:
        """Answer with the error and close; only close if an answer has begun already. Cancels a running request."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.abort()
            return
        self.transport.write(_response(error))
        self.transport.close()


def in_pieces(app: ASGIApp) -> ASGIApp:
    """`app` with its answers written piece by piece, each once the client took enough of those before."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_pieces(message: Message) -> None:
            body = message.get("body", b"")
            if len(body) <= PIECE:
                await send(message)
                return
            for start in range(0, len(body), PIECE):
                more = start + PIECE < len(body) or message.get("more_body", False)
                await send({**message, "body": body[start : start + PIECE], "more_body": more})

        await app(scope, receive, send_pieces)

    return wrapped


def _response(error: AgentSpecError) -> bytes:
    body = encode(error.body())
    lines = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body
