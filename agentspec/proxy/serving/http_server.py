"""A uvicorn server whose connections are counted, bounded and watched."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from types import FrameType

import uvicorn
from starlette.types import ASGIApp
from uvicorn.config import STARTUP_FAILURE

from agentspec.proxy.serving.connections import Connections
from agentspec.proxy.serving.httptools_protocol import HttpToolsConnection
from agentspec.proxy.serving.listener import BACKLOG, AcceptsConnections, Listener, connection_capacity, listen
from agentspec.proxy.serving.protocol import BoundedConnection, in_pieces
from agentspec.proxy.serving.tls import tls_context
from agentspec.settings.server import ServerSettings

TICKS = 10  # of uvicorn's main loop in a second
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-type: text/plain\r\n"
    b"content-length: 21\r\n\r\ntoo many connections\n"
)


class HttpServer(uvicorn.Server):
    """Serves `app` by the limits of `settings` until SIGTERM or SIGINT; `grace` seconds are left to running requests.

    `connections` admits and watches connections; by default as many as are configured and the system allows.

    Raises `ConfigurationError` for a certificate that cannot be used.
    """

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, *, grace: int = 1, connections: Connections | None = None
    ) -> None:
        tls = tls_context(settings)
        super().__init__(
            uvicorn.Config(
                in_pieces(app),
                interface="asgi3",
                host=settings.host,
                port=settings.port,
                http=HttpToolsConnection,
                lifespan="on",
                ws="none",
                access_log=False,
                log_config=None,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=grace,
                ssl_context_factory=None if tls is None else lambda config, default: tls,
            )
        )
        self.tls = tls
        self.limit(settings)
        self.connections = connections or Connections(settings, connection_capacity(settings))

    def limit(self, settings: ServerSettings) -> None:
        """Use these limits for new connections, and for the time of those that are open."""
        self.config.timeout_keep_alive = settings.keep_alive_timeout  # type: ignore[assignment]
        self.config.h11_max_incomplete_event_size = settings.max_header_bytes
        if self.started:
            self.connections.settings = settings

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on `sockets`, or else bind the configured address. Raises `ConfigurationError` if that fails."""
        super().run(listen(self.config.host, self.config.port) if sockets is None else sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take the place of uvicorn's, which accepts connections without a bound."""
        assert sockets is not None
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        listener = self.listener(sockets)
        await listener.start_serving()
        self.servers = [listener]  # type: ignore[list-item]  # uvicorn only closes it
        self._log_started_message(sockets)
        self.started = True

    def listener(self, sockets: list[socket.socket]) -> AcceptsConnections:
        """What accepts the connections, given the sockets to listen on."""
        return Listener(sockets, self.accepted)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; unlike uvicorn's, the process then ends with status 0 and not by the signal."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        ticks = min(max(int(self.connections.shortest * TICKS / 4), 1), TICKS)
        if counter % ticks == 0:
            self._sweep()
        return await super().on_tick(counter)

    def _sweep(self) -> None:
        watched = [one for one in self.server_state.connections if isinstance(one, BoundedConnection)]
        self.connections.sweep(watched, asyncio.get_running_loop().time())

    def accepted(self, connection: socket.socket, address: str) -> Coroutine[None, None, None] | None:
        """Refuse a connection from `address`, or return what serves it."""
        network = self.connections.admit(address)
        if network is None:
            with suppress(OSError):
                if self.tls is None:
                    connection.send(REFUSAL)
            connection.close()
            return None
        return self.open(connection, partial(self.connections.release, network))

    async def open(self, connection: socket.socket, release: Callable[[], None]) -> None:
        """Hand an accepted connection to a protocol; with TLS, once its handshake is complete.

        `release` is called once the connection is over.
        """
        protocol = HttpToolsConnection(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        protocol.on_close = release
        limit = None if self.tls is None else self.connections.settings.header_timeout
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol, connection, ssl=self.tls, ssl_handshake_timeout=limit
            )
        except (OSError, asyncio.CancelledError):  # the handshake failed, or the server stops
            if protocol.transport is None:
                protocol.abandon()
