"""The process of the local engine: it answers the workers, on a Unix socket that only this user can reach."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentspec.errors import AgentSpecError, AuthenticationError, ConfigurationError
from agentspec.proxy.admission.auth import Identity
from agentspec.proxy.admission.concurrency import unpressed
from agentspec.proxy.admission.turns import ProgramCall
from agentspec.proxy.app import ProcessContext, backend_samples, create_app, index_size
from agentspec.proxy.forwarding.engine_link import TENANT_HEADER, noted
from agentspec.proxy.metering.metering import Metering
from agentspec.proxy.metering.store import UsageSource
from agentspec.proxy.request_record import RequestRecord
from agentspec.proxy.serving.connections import Connections
from agentspec.proxy.serving.listener import BACKLOG
from agentspec.proxy.workers.member import MemberServer, report, run
from agentspec.proxy.workers.process import Start, read_start
from agentspec.proxy.workers.stored import RemoteResponses, StoreHandlers, answer_responses, with_stored
from agentspec.proxy.workers.usage import RemoteUsage, answer_usage
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.settings.server import ServerSettings
from agentspec.telemetry.metrics import Metrics
from agentspec.telemetry.metrics_sum import dump
from agentspec.telemetry.samples import BackendSample, TenantSample
from agentspec.version import __version__

ENGINE_METRICS = ("agentspec_engine_", "agentspec_index_", "agentspec_member_")
_PATIENT = 10 * 365 * 86400.0  # seconds: the workers know which client is slow
_MOST_CONNECTIONS = 1 << 20


class Unlimited:
    """Admits everything: what comes has a place already."""

    def __init__(self) -> None:
        self.running = 0
        self.closed = False
        self.pressed = unpressed

    def enter(
        self, tenant: str, receive: Receive, call: ProgramCall | None = None
    ) -> AbstractAsyncContextManager[Receive]:
        return self._enter(receive)

    def update(self, settings: ServerSettings) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do: the workers refuse requests."""

    def samples(self) -> list[TenantSample]:
        return []

    @asynccontextmanager
    async def _enter(self, receive: Receive) -> AsyncIterator[Receive]:
        self.running += 1
        try:
            yield receive
        finally:
            self.running -= 1


class RelayedCallers:
    """Believes what the worker says about the tenant: it has checked the key."""

    def __bool__(self) -> bool:
        return True

    def identify(self, headers: Headers) -> Identity:
        identity = self.find(headers)
        if identity is None:
            raise AuthenticationError("only the workers of this gateway are answered here")
        return identity

    def find(self, headers: Headers) -> Identity | None:
        given = headers.getlist(TENANT_HEADER.decode())
        return Identity(unquote(given[0])) if len(given) == 1 else None


class EngineServer(MemberServer):
    """Serves the workers. It checks no keys and no limits on clients, since the workers did."""

    def __init__(self, start: Start) -> None:
        settings = own_settings(start.settings)
        self._runtime = Runtime(settings)
        usage = UsageSource(self._runtime)
        metering = Metering(elsewhere=True, close=usage.close)
        process = ProcessContext(Unlimited(), settings.server.max_body_memory, metering=metering)
        app = create_app(self._runtime, settings, process=process)
        app.authenticator, app.logs_requests = RelayedCallers(), False
        super().__init__(app, replace(start, settings=settings), Connections(settings.server, _MOST_CONNECTIONS))
        stores: StoreHandlers = {
            RemoteResponses.route: partial(answer_responses, self._runtime),
            RemoteUsage.route: partial(answer_usage, usage),
        }
        self.config.app = with_stored(noting(cast(ASGIApp, self.config.app)), stores)
        self._samples: list[BackendSample] = []
        self._metrics = Metrics(
            version=__version__,
            index_size=lambda: index_size(self._runtime),
            backends=lambda: self._samples,
            members=lambda: self._runtime.fleet.samples() if self._runtime.fleet else (),
        )
        self._collecting: set[asyncio.Task[None]] = set()

    async def collect(self) -> str:
        self._samples = await backend_samples(self._runtime)
        return dump(self._metrics.registry, only=ENGINE_METRICS)

    def heard(self, name: str, *told: Any) -> None:
        if name == "collect":
            task = asyncio.get_running_loop().create_task(self._answer(*told))
            self._collecting.add(task)
            task.add_done_callback(self._collecting.discard)

    def reloaded(self, settings: Settings) -> None:
        own = own_settings(settings)
        self.app.apply(own.server, RelayedCallers())
        self.app.reach(own.backends)
        self.limit(own.server)
        self.reloader.settings = own

    async def _answer(self, *told: Any) -> None:
        self.channel.send("metrics", await self.collect(), *told)


def own_settings(settings: Settings) -> Settings:
    """The settings with the limits on clients left to the workers."""
    patient = {
        "allowed_hosts": ("*",),
        "tls_cert_file": None,
        "tls_key_file": None,
        "max_connections_per_address": _MOST_CONNECTIONS,
        "header_timeout": _PATIENT,
        "keep_alive_timeout": _PATIENT,
        "write_timeout": _PATIENT,
        "min_body_rate": 0,
        "max_body_memory": settings.server.workers * settings.server.max_body_memory,
    }
    return settings.model_copy(update={"server": settings.server.model_copy(update=patient)})


def noting(app: ASGIApp) -> ASGIApp:
    """`app` with what its record holds behind every answer, whose length is then not known at its begin."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [pair for pair in message["headers"] if pair[0] != b"content-length"]
                message = {**message, "headers": kept}
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                message = {**message, "body": message.get("body", b"") + noted(RequestRecord.of(scope))}
            await send(message)

        await app(scope, receive, sending if scope["type"] == "http" else send)

    return wrapped


def listen_at(path: Path) -> socket.socket:
    """Listen at a path that only this user can reach. Raises `ConfigurationError`."""
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listening.bind(str(path))
    except OSError as error:
        advice = "TMPDIR must name a folder that can be written to, with a short path"
        raise ConfigurationError(
            f"cannot make the engine's socket {path}: {error.strerror or error}; {advice}"
        ) from None
    finally:
        os.umask(before)
    listening.listen(BACKLOG)
    return listening


def main() -> None:
    """Run the engine in this process, which the parent has started."""
    start = read_start()
    assert start.engine is not None
    try:
        server, listening = EngineServer(start), listen_at(start.engine)
    except AgentSpecError as error:
        report(start, error)
    try:
        run(server, [listening])
    finally:
        if server.orphaned:  # nobody else cleans up
            start.engine.unlink(missing_ok=True)
            with suppress(OSError):
                start.engine.parent.rmdir()
