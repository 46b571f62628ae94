"""Starts, runs, reloads and drains the gateway."""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from agentspec.backends.heap import share_heaps
from agentspec.backends.model_store import child
from agentspec.errors import ShuttingDownError
from agentspec.proxy import logs
from agentspec.proxy.app import create_app
from agentspec.proxy.hosts import is_unprotected
from agentspec.proxy.middleware import GatewayMiddleware
from agentspec.proxy.serving.connections import Connections
from agentspec.proxy.serving.http_server import HttpServer
from agentspec.proxy.serving.reload import Reloader
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings

COLLECT_AFTER = (5000, 20, 20)  # new objects, and collections of the younger generation; Python's are 700, 10, 10
END_SECONDS = 2.0  # for the last events of answers that the end of the drain interrupts


def serve(settings: Settings, *, log_level: str = "INFO", reload: Callable[[], Settings] | None = None) -> None:
    """Run the gateway in this process until SIGTERM or SIGINT, then drain: new requests get 503, running ones
    `drain_timeout` seconds.

    SIGHUP takes over keys and limits of the settings that `reload` returns. Returns once everything is flushed and
    closed. A signal while a model loads ends the process at once with status 0, since no request was served yet.
    Raises what building the backends raises, and `ConfigurationError` if the address or the certificate cannot be used.
    Drains and raises `EngineStoppedError` when a local engine's device fails: only a new process can use it again.
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
    GatewayServer(app, settings, reload=reload).run()
    if app.loading.left_behind:
        end_process()
    if app.loading.failure is not None:
        raise app.loading.failure


def spare_what_is_loaded() -> None:
    """Keep the garbage collector from what lives as long as the process, and let it run less often.

    A full collection stops every request: for 50 ms and more over what is loaded even without a model.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


def end_process() -> NoReturn:
    """End the process with status 0 without waiting for the loading thread, which cannot be interrupted."""
    child.end_all()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class GatewayServer(HttpServer):
    """A server that drains instead of stopping immediately; a second signal ends the drain at once."""

    def __init__(
        self,
        app: GatewayMiddleware,
        settings: Settings,
        *,
        reload: Callable[[], Settings] | None = None,
        connections: Connections | None = None,
    ) -> None:
        super().__init__(app, settings.server, connections=connections)
        self._app = app
        app.metrics.connections(lambda: (self.connections.open, self.connections.ended.copy()))
        self.reloader = Reloader(self, app, settings, reload)
        self._draining_since: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._draining_since is not None:
            super().handle_exit(sig, frame)
            return
        self.drain()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals(), self.reloader.on_signal():
            yield

    @property
    def draining(self) -> bool:
        return self._draining_since is not None

    def drain(self) -> None:
        """Refuse new requests and stop once the running ones are done or `drain_timeout` is over."""
        self._app.limiter.close()
        self._app.loading.abort()
        self._draining_since = time.monotonic()

    async def on_tick(self, counter: int) -> bool:
        if self._draining_since is None and self._app.loading.failure is not None:
            self.drain()
        if self._drained() or self._app.loading.error is not None:
            return True
        await self.reloader.reload_if_asked()
        return await super().on_tick(counter)

    def _drained(self) -> bool:
        """Whether nothing runs any more. Interrupts what runs when the time is over, so that it ends with an error."""
        if self._draining_since is None or not self._app.limiter.running:
            return self._draining_since is not None
        late = time.monotonic() - self._draining_since - self.reloader.settings.server.drain_timeout
        if late > 0:
            self._app.deadlines.interrupt(ShuttingDownError("the server is shutting down: this answer is cut short"))
        return late > END_SECONDS
