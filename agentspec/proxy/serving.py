"""Serves the gateway by uvicorn, with a drain that reports to clients which answers it cuts short."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import sys
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import uvicorn

from agentspec.backends import model_store
from agentspec.errors import ConfigurationError, ShuttingDownError
from agentspec.proxy import logs
from agentspec.proxy.app import create_app
from agentspec.proxy.auth import is_loopback
from agentspec.proxy.connections import END_SECONDS, BoundedConnection
from agentspec.proxy.middleware import GatewayMiddleware
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.telemetry import tracing

KEEP_ALIVE_SECONDS = 75  # of a connection without a request
COLLECT_AFTER = (5000, 20, 20)  # new objects, and collections of the younger generation; Python's are 700, 10, 10


class GatewayServer(uvicorn.Server):
    """Serves until SIGTERM or SIGINT, then drains: it takes no more connections, requests without a slot get 503, and
    running ones have `drain_timeout` seconds, or until a second signal. Then they end with an error.
    """

    def __init__(self, app: GatewayMiddleware, settings: Settings) -> None:
        self._app, self._settings = app, settings.server
        self._announced = False
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
                log_level=logging.WARNING,  # "running" is said when a request can be answered
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=self._settings.drain_timeout + END_SECONDS,  # type: ignore[arg-type]
            )
        )
        app.metrics.connections(lambda: len(self.server_state.connections))

    async def startup(self, sockets: list[Any] | None = None) -> None:
        """Unlike uvicorn's, an address that cannot be had is refused before anything is loaded."""
        host, port = self._settings.host, self._settings.port
        if sockets is None:
            loop = asyncio.get_running_loop()
            try:
                trial = await loop.create_server(asyncio.Protocol, host, port, start_serving=False)
            except OSError as error:
                message = f"cannot listen on server.host = {host!r}, server.port = {port}: {error}"
                raise ConfigurationError(message) from None
            trial.close()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Unlike after uvicorn's, the process then ends with status 0 and not by the signal."""
        if self.should_exit:
            self._interrupt()
        self.drain()

    def drain(self) -> None:
        self._app.loading.abort()
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        loading = self._app.loading
        if loading.failure is not None:
            self.drain()
        elif loading.seconds is not None and not self._announced:
            self._announced = True
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            where = {"url": f"{url}/v1"} | ({"page": f"{url}/ui"} if self._settings.ui else {})
            logs.logger.info("ready", **where, seconds=round(loading.seconds, 1), models=loading.models)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        self._app.slots.close()  # in the same turn as the listening sockets and idle connections
        late = asyncio.get_running_loop().call_later(self._settings.drain_timeout, self._interrupt)
        await super().shutdown(sockets)
        late.cancel()

    def _interrupt(self) -> None:
        for deadline in tuple(self._app.deadlines):
            deadline.interrupt(ShuttingDownError("the server is shutting down: this answer is cut short"))


def serve(settings: Settings, *, log_level: str = "INFO") -> None:
    """Run the gateway in this process until SIGTERM or SIGINT, then drain. Returns once all is flushed and closed.

    A signal while a model loads ends the process at once with status 0. Raises what building the backends raises, and
    `EngineStoppedError` after a drain when a local engine's device fails: only a new process can use it again.
    """
    logs.configure(log_level, background=True)
    tracing.configure()
    runtime = Runtime(settings)
    app = create_app(runtime, settings)
    app.loading.when_ready = spare_what_is_loaded
    if not (is_loopback(settings.server.host) or settings.server.api_keys):
        logs.logger.warning(
            "every client that reaches this address is served: set server.api_keys", host=settings.server.host
        )
    allow_open_files()
    GatewayServer(app, settings).run()
    if app.loading.left_behind:
        end_process()
    if app.loading.failure is not None:
        raise app.loading.failure


def allow_open_files() -> None:
    """Let this process open as many files as the system allows it: each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def spare_what_is_loaded() -> None:
    """Keep the garbage collector from what lives as long as the process, and let it run less often.

    A full collection stops every request: for 50 ms and more over what is loaded even without a model.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


def end_process() -> NoReturn:
    """End the process with status 0 without waiting for the loading thread, which cannot be interrupted."""
    model_store.end_all()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
