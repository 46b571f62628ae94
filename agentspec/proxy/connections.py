"""The bounds of a client's connection: deadlines for its heads, for writing and for a whole request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentspec.errors import (
    AgentSpecError,
    HeadersTooLargeError,
    InvalidRequestError,
    NotReadyError,
    SlowClientError,
)
from agentspec.protocol.wire import encode
from agentspec.settings.server import ServerSettings

MAX_HEADER_BYTES = 32 << 10
HEAD_SECONDS = 10.0  # for a whole head
WRITE_SECONDS = 30.0  # that a client may take nothing of its answer before it is cut off
WRITE_BUFFER = 32 << 10  # bytes of an answer: writing pauses above it
END_SECONDS = 2.0  # for the last events of answers that the end of the drain interrupts


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection, which has deadlines for heads, for writing and for the whole request, and takes no head,
    chunk extension or trailer without a bound.
    """

    def __init__(self, settings: ServerSettings, **given: Any) -> None:
        super().__init__(**given)
        self._settings = settings
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._unparsed = 0  # bytes since the last head, or piece of a body, was complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=WRITE_BUFFER)
        if len(self.connections) > self._settings.max_connections:
            self._end(NotReadyError("too many connections (server.max_connections); try again soon"))
        else:
            self._start("head", HEAD_SECONDS, self._end_head)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers.values():
            timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed += len(data)
        if "head" not in self._timers and not self._answering:
            self._start("head", HEAD_SECONDS, self._end_head)
        super().data_received(data)
        if self._unparsed > MAX_HEADER_BYTES:
            self._end(HeadersTooLargeError(f"the head has more than {MAX_HEADER_BYTES} bytes"))

    def on_headers_complete(self) -> None:
        """Refuse with 400 what other servers may read differently: RFC 9112, sections 3.2, 6.1 and 9.3.2. An offer of
        another protocol is refused since httptools would read the body behind it as the next request.
        """
        assert self.parser is not None
        self._unparsed = 0
        self._stop("head")
        chunks = any(name == b"transfer-encoding" for name, _ in self.headers)
        old = chunks and self.parser.get_http_version() == "1.0"
        if old or self._answering or self.parser.should_upgrade() or not self.url.startswith(b"/"):
            raise ValueError
        super().on_headers_complete()
        self.headers = []  # takes the fields behind a body, which are no headers: no server in front has looked at them
        self._start("request", self._settings.request_timeout + END_SECONDS, self.transport.abort)

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        self._stop("head")
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Drop bytes after a whole request that are not HTTP, and close the connection behind its answer."""
        if self._answering and not self.cycle.more_body:
            self.cycle.keep_alive = False
        else:
            message = "this is not a valid HTTP/1.1 request, or one that offers another protocol (Upgrade)"
            self._end(InvalidRequestError(message))

    def on_response_complete(self) -> None:
        self._stop("request")
        self.cycle.body = bytearray()  # what was not read would stay as long as the connection is idle
        super().on_response_complete()
        self._watch_unsent()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unsent()

    def resume_writing(self) -> None:
        self._stop("write")
        super().resume_writing()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch_unsent(self) -> None:
        """Cut the client off unless it takes some of what waits for it in time."""
        if unsent := self.transport.get_write_buffer_size():
            self._start("write", WRITE_SECONDS, self._end_unsent, unsent)

    def _end_unsent(self, before: int) -> None:
        if self.transport.get_write_buffer_size() >= before:
            self.transport.abort()
        else:
            self._watch_unsent()

    def _end_head(self) -> None:
        if self._unparsed:
            self._end(SlowClientError(f"no complete head within {HEAD_SECONDS:g} seconds"))
        elif not self._answering:  # a client that connected ahead of need expects no answer
            self.transport.close()

    def _end(self, error: AgentSpecError) -> None:
        if self._answering and self.cycle.response_started:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.transport.write(_response(error))
            self.transport.close()
            self._watch_unsent()

    def _start(self, name: str, seconds: float, end: Callable[..., None], *arguments: Any) -> None:
        self._stop(name)
        self._timers[name] = self.loop.call_later(seconds, end, *arguments)

    def _stop(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()


def _response(error: AgentSpecError) -> bytes:
    body = encode(error.body())
    status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"
    headers = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
    return f"{status}\r\n{headers}\r\n\r\n".encode() + body
