"""Starts, runs and drains the gateway under uvicorn."""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
import sys
import time
from types import FrameType
from typing import NoReturn

import uvicorn

from agentspec.backends.model_store import child
from agentspec.errors import ConfigurationError
from agentspec.proxy import logs
from agentspec.proxy.app import create_app
from agentspec.proxy.middleware import GatewayMiddleware
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.settings.server import ServerSettings


def serve(settings: Settings, *, log_level: str = "INFO") -> None:
    """Run the gateway until SIGTERM or SIGINT, then drain: new requests get 503, running ones `drain_timeout` seconds.

    Returns once everything is flushed and closed. A signal while a model loads ends the process at once with status 0,
    since no request was served yet. Raises what building the backends raises. When a local engine's device fails,
    drains and raises `EngineStoppedError`, since only a new process can use the device again.
    """
    logs.configure(log_level)
    runtime = Runtime.from_settings(settings)
    app = create_app(runtime, settings)
    if is_unprotected(settings.server):
        logs.logger.warning(
            "everybody who reaches this address is served: set server.api_keys", host=settings.server.host
        )
    try:
        GatewayServer(app, settings).run()
    except SystemExit:  # how uvicorn says that it cannot listen
        address = f"{settings.server.host}:{settings.server.port}"
        raise ConfigurationError(
            f"cannot listen on {address}: it is taken or not this machine's; change server.host or server.port"
        ) from None
    if app.loading.left_behind:
        _end_process()
    if app.loading.failure is not None:
        raise app.loading.failure


def _end_process() -> NoReturn:
    """End the process with status 0 without waiting for the loading thread, which cannot be interrupted."""
    child.end_all()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def is_unprotected(server: ServerSettings) -> bool:
    """Whether other machines can use the gateway without an API key."""
    try:
        loopback = ipaddress.ip_address(server.host).is_loopback
    except ValueError:
        loopback = server.host == "localhost"
    return not (loopback or server.api_keys)


class GatewayServer(uvicorn.Server):
    """A uvicorn server that drains instead of stopping immediately; a second signal ends the drain at once."""

    def __init__(self, app: GatewayMiddleware, settings: Settings) -> None:
        server = settings.server
        super().__init__(
            uvicorn.Config(
                app,
                host=server.host,
                port=server.port,
                lifespan="on",
                ws="none",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=1,
                timeout_keep_alive=75,  # longer than clients keep idle connections, so that the client closes first
            )
        )
        self._app = app
        self._drain_timeout = server.drain_timeout
        self._draining_since: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._draining_since is not None:
            self.should_exit = True
            self.force_exit = sig == signal.SIGINT
            return
        self.drain()

    def drain(self) -> None:
        """Refuse new requests and stop once the running ones are done or `drain_timeout` is over."""
        self._app.limiter.close()
        self._app.loading.abort()
        self._draining_since = time.monotonic()

    async def on_tick(self, counter: int) -> bool:
        if self._draining_since is None and self._app.loading.failure is not None:
            self.drain()
        since = self._draining_since
        if since is not None and (not self._app.limiter.running or time.monotonic() - since > self._drain_timeout):
            return True
        if self._app.loading.error is not None:
            return True
        return await super().on_tick(counter)
