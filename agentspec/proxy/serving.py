"""Serves the gateway by uvicorn, with bounds on its connections, and a drain that tells whom it cuts short."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from types import FrameType
from typing import Any, NoReturn

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentspec.backends.model_store import store
from agentspec.backends.threads import share_heaps
from agentspec.errors import (
    AgentSpecError,
    HeadersTooLargeError,
    InvalidRequestError,
    NotReadyError,
    ShuttingDownError,
    SlowClientError,
)
from agentspec.protocol.wire import encode
from agentspec.proxy import logs
from agentspec.proxy.app import GatewayMiddleware, create_app
from agentspec.proxy.auth import MAX_HEADER_BYTES, is_unprotected
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.settings.server import ServerSettings

HEAD_SECONDS = 10.0  # for a whole head
WRITE_SECONDS = 30.0  # that a client may take nothing of its answer before it is cut off
KEEP_ALIVE_SECONDS = 75  # of a connection without a request
WRITE_BUFFER = 32 << 10  # bytes of an answer: writing pauses above it
OTHER_FILES = 128  # besides connections and upstream calls: logs, the index, model files
END_SECONDS = 2.0  # for the last events of answers that the end of the drain interrupts
COLLECT_AFTER = (5000, 20, 20)  # new objects, and collections of the younger generation; Python's are 700, 10, 10


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
        self.headers = []  # takes the fields behind a body, which are no headers: nobody in front has looked at them
        self._start("request", self._settings.request_timeout + END_SECONDS, self.transport.abort)

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        self._stop("head")
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP, behind a whole request, is dropped: the answer to that one is the last."""
        if self._answering and not self.cycle.more_body:
            self.cycle.keep_alive = False
        else:
            message = "this is not a valid HTTP/1.1 request, or one that offers another protocol (Upgrade)"
            self._end(InvalidRequestError(message))

    def on_response_complete(self) -> None:
        self._stop("request")
        self.cycle.body = bytearray()  # what nobody read would stay as long as the connection is idle
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
        """Answer with `error` and close; cut an answer that has begun."""
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


class GatewayServer(uvicorn.Server):
    """Serves until SIGTERM or SIGINT, then drains: it takes no more connections, requests without a slot get 503, and
    running ones have `drain_timeout` seconds, or until a second signal. Then they end with an error.
    """

    def __init__(self, app: GatewayMiddleware, settings: Settings) -> None:
        self._app, self._settings = app, settings.server
        super().__init__(
            uvicorn.Config(
                app,
                interface="asgi3",
                host=self._settings.host,
                port=self._settings.port,
                http=partial(BoundedConnection, self._settings),  # type: ignore[arg-type]
                lifespan="on",
                ws="none",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=self._settings.drain_timeout + END_SECONDS,  # type: ignore[arg-type]
            )
        )
        app.metrics.connections(lambda: len(self.server_state.connections))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Unlike after uvicorn's, the process then ends with status 0 and not by the signal."""
        if self.should_exit:
            self._interrupt()
        self.drain()

    def drain(self) -> None:
        """Take no more connections, and stop once the running requests are done."""
        self._app.loading.abort()
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self._app.loading.failure is not None:
            self.drain()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        self._app.limiter.close()  # in the same turn as the listening sockets and idle connections
        late = asyncio.get_running_loop().call_later(self._settings.drain_timeout, self._interrupt)
        await super().shutdown(sockets)
        late.cancel()

    def _interrupt(self) -> None:
        self._app.deadlines.interrupt(ShuttingDownError("the server is shutting down: this answer is cut short"))


def serve(settings: Settings, *, log_level: str = "INFO") -> None:
    """Run the gateway in this process until SIGTERM or SIGINT, then drain. Returns once all is flushed and closed.

    A signal while a model loads ends the process at once with status 0, since no request was served yet. Raises what
    building the backends raises. Drains and raises `EngineStoppedError` when a local engine's device fails: only a new
    process can use it again.
    """
    share_heaps()
    logs.configure(log_level, background=True)
    runtime = Runtime(settings)
    app = create_app(runtime, settings)
    app.loading.when_ready = spare_what_is_loaded
    if is_unprotected(settings.server):
        logs.logger.warning(
            "everybody who reaches this address is served: set server.api_keys", host=settings.server.host
        )
    allow_open_files(settings.server.max_connections + settings.server.max_concurrent + OTHER_FILES)
    GatewayServer(app, settings).run()
    if app.loading.left_behind:
        end_process()
    if app.loading.failure is not None:
        raise app.loading.failure


def allow_open_files(count: int) -> None:
    """Let this process open so many files, or as many as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < count:
            logs.logger.warning("fewer connections than configured", open_files=allowed, wanted=count)


def spare_what_is_loaded() -> None:
    """Keep the garbage collector from what lives as long as the process, and let it run less often.

    A full collection stops every request: for 50 ms and more over what is loaded even without a model.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


def end_process() -> NoReturn:
    """End the process with status 0 without waiting for the loading thread, which cannot be interrupted."""
    store.end_all()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _response(error: AgentSpecError) -> bytes:
    body = encode(error.body())
    status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"
    headers = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
    return f"{status}\r\n{headers}\r\n\r\n".encode() + body
