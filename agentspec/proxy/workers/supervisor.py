"""The parent of the gateway's processes: it listens, gives out places, and starts, watches, reloads and ends them."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import signal
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr
from uvicorn.loops.auto import auto_loop_factory

from agentspec import errors
from agentspec.backends.settings import BackendSettings
from agentspec.errors import AgentSpecError
from agentspec.proxy import logs
from agentspec.proxy.admission.auth import Authenticator
from agentspec.proxy.admission.concurrency import ConcurrencyLimiter
from agentspec.proxy.hosts import is_unprotected
from agentspec.proxy.metering.key_limits import KeyLimits
from agentspec.proxy.serving.connections import Connections
from agentspec.proxy.serving.listener import Listener, connection_capacity, listen
from agentspec.proxy.serving.reload import Reloader
from agentspec.proxy.serving.server import END_SECONDS
from agentspec.proxy.serving.tls import tls_context
from agentspec.proxy.workers.channel import Message
from agentspec.proxy.workers.child import ENGINE, WORKER, Child, Life
from agentspec.proxy.workers.handover import Handover
from agentspec.proxy.workers.key_limits import WorkerKeyLimits
from agentspec.proxy.workers.places import WorkerPlaces
from agentspec.proxy.workers.process import packed
from agentspec.proxy.workers.scrapes import Scrapes
from agentspec.reasoning.settings import StrategySettings
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.settings.server import ServerSettings
from agentspec.version import __version__

TICK_SECONDS = 0.05
SWEEP_TICKS = 20
CLOSING_SECONDS = 20.0  # beyond the drain, for what closing the engine and the cache takes


class ProcessFailedError(AgentSpecError):
    """One of the gateway's processes cannot be started."""


def serve(settings: Settings, *, log_level: str = "INFO", reload: Callable[[], Settings] | None = None) -> None:
    """Run the gateway in `server.workers` processes until SIGTERM or SIGINT, and drain as `serving.server.serve` does.

    SIGHUP takes over keys and limits in all of them. Raises what building the backends raises, `ConfigurationError` if
    the address or the certificate cannot be used, and `ProcessFailedError` if a process ends again and again at its
    start. Only for the main thread, which gets the signals.
    """
    logs.configure(log_level, background=True)
    if is_unprotected(settings.server):
        logs.logger.warning(
            "everybody who reaches this address is served: set server.api_keys", host=settings.server.host
        )
    folder = Path(tempfile.mkdtemp(prefix="agentspec-"))  # which only this user can enter
    try:
        supervisor = Supervisor(settings, folder, log_level, reload)
        with asyncio.Runner(loop_factory=auto_loop_factory(use_subprocess=True)) as runner:
            runner.run(supervisor.run())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Supervisor:
    """Runs the gateway's processes, with files in `folder`. Raises `ConfigurationError` for what cannot be used."""

    def __init__(
        self, settings: Settings, folder: Path, log_level: str, reload: Callable[[], Settings] | None = None
    ) -> None:
        server = settings.server
        Authenticator(server.api_keys)
        self.tls: ssl.SSLContext | None = tls_context(server)
        self._secret = SecretStr(_secret(server))
        self._sockets = listen(server.host, server.port)
        self._limiter, self._key_limits = ConcurrencyLimiter(server), KeyLimits()
        self._limiter.pressed = self._pressed
        self._key_limits.update(server)
        capacity = connection_capacity(server)
        self._handover = Handover(Connections(server, capacity), secure=self.tls is not None)
        self._reloader = Reloader(self, self, settings, reload)
        self._workers = [Child(str(number), WORKER) for number in range(1, server.workers + 1)]
        self._engine = Child("engine", ENGINE) if needs_engine(settings) else None
        self._scrapes = Scrapes(__version__, self._limiter, self._handover.connections)
        self._told = {
            "log_level": log_level,
            "engine": folder / "engine" if self._engine else None,
            "capacity": capacity,
            "since": int(time.time()),
        }
        self._drained_members: dict[str, bool] = {}  # members of pools, by name
        self._draining_since: float | None = None
        self._ends = False
        self._announced = self._said_ready = False
        self._failure: AgentSpecError | None = None

    async def run(self) -> None:
        """Run everything until a drain is over. Raises the error of a process that cannot be started."""
        loop = asyncio.get_running_loop()
        for sent in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sent, self._asked_to_end)
        listener = Listener(self._sockets, self._handover.accepted)
        with self._reloader.on_signal():
            try:
                await listener.start_serving()
                tick = 0
                while not await self._tick(loop.time(), tick):
                    tick += 1
                    await asyncio.sleep(TICK_SECONDS)
            finally:
                listener.close()
                await listener.wait_closed()
                self._handover.close()
                for child in self._children():
                    if child.life is not None:
                        child.life.process.kill()
                        child.life.process.wait()
        if self._failure is not None:
            raise self._failure

    # What the reloader calls.

    async def check(self, settings: ServerSettings) -> None:
        """Raises `ConfigurationError` for keys that cannot be used with the upstreams that there are."""
        upstreams = Runtime(self._reloader.settings, local=False)
        try:
            await asyncio.to_thread(upstreams.start)
            await upstreams.check_tenants(settings.tenant_names)
        finally:
            await upstreams.aclose()

    def apply(self, settings: ServerSettings, authenticator: Authenticator) -> None:
        """Apply limits that hold for all processes together."""
        self._limiter.update(settings)
        self._key_limits.update(settings)

    def reach(self, backends: Mapping[str, BackendSettings]) -> None:
        """Nothing: the workers are told all settings, and reach the servers themselves."""

    def limit(self, settings: ServerSettings) -> None:
        self._handover.connections.settings = settings

    # The processes.

    def _children(self) -> Iterator[Child]:
        yield from self._workers
        if self._engine is not None:
            yield self._engine

    def _settings(self) -> Settings:
        """The settings for another process: the secret is the same in all."""
        settings = self._reloader.settings
        secret = {"secret": self._secret, "secret_file": None}
        return settings.model_copy(update={"server": settings.server.model_copy(update=secret)})

    async def _tick(self, now: float, tick: int) -> bool:
        """Look after everything; returns whether all is over."""
        for child in self._children():
            life = child.poll(now)
            if life is not None:
                self._ended(child, life)
        if self._draining_since is not None:
            return self._drained(now)
        server = self._reloader.settings.server
        for child in self._children():
            child.watch(TICK_SECONDS, hang_timeout=server.hang_timeout, load_timeout=server.load_timeout)
            if child.life is None and now >= child.restart_at and self._failure is None:
                await self._start(child)
        before = self._reloader.settings
        await self._reloader.reload_if_asked()
        if self._reloader.settings is not before:
            self._broadcast("reload", packed(self._settings()))
        if tick % SWEEP_TICKS == 0:
            self._handover.connections.sweep((), now)  # logs what was refused
        return False

    async def _start(self, child: Child) -> None:
        try:
            await child.start({**self._told, "settings": self._settings()}, self._received, self._places)
        except OSError as error:
            child.not_started(asyncio.get_running_loop().time())
            logs.logger.error("process not started", process=child.name, reason=error.strerror)
        child.send("engine", self._engine_ready)
        for name, on in self._drained_members.items():
            child.send("drain member", name, on)
        if self._draining_since is not None:  # a signal came meanwhile
            child.send("drain")

    def _ended(self, child: Child, life: Life) -> None:
        """Take back what an ended process had, and give up if starting it again makes no sense."""
        life.leave_all()
        if life.recipient is not None:
            self._handover.ended(life.recipient)
        self._scrapes.ended(child)
        if child is self._engine:
            self._tell_engine()
        if self._draining_since is not None:
            return
        child.log_end()
        if child.gives_up:
            self._failure = _failure(child)
            self._drain()

    @property
    def _engine_ready(self) -> bool:
        return self._engine is not None and self._engine.life is not None and self._engine.life.ready

    def _tell_engine(self) -> None:
        """Tell the workers whether the engine answers now."""
        for worker in self._workers:
            worker.send("engine", self._engine_ready)

    def _places(self, send: Callable[..., None]) -> tuple[WorkerPlaces, WorkerKeyLimits]:
        return WorkerPlaces(self._limiter, send), WorkerKeyLimits(self._key_limits, send)

    def _pressed(self) -> bool:
        """Whether some worker has seen that the servers' KV caches are nearly full."""
        lives = (worker.life for worker in self._workers)
        return any(life.places.pressed for life in lives if life is not None and life.places is not None)

    def _received(self, child: Child, message: Message) -> None:
        """Take a message of a process."""
        life = child.life
        if life is None:
            return
        match message:
            case ["take" | "leave" | "press" as name, *told] if life.places is not None:
                getattr(life.places, name)(*told)
            case ["admit" | "settle" | "recorded" as name, *told] if life.key_limits is not None:
                getattr(life.key_limits, name)(*told)
            case ["opened", *told] if life.recipient is not None:
                self._handover.opened(life.recipient, told)
            case ["closed connection", *told] if life.recipient is not None:
                self._handover.closed(life.recipient, told)
            case ["drain member", member, on]:
                self._drained_members.pop(member, None)  # processes that start later hear these in order
                self._drained_members[member] = on
                self._broadcast("drain member", member, on)
            case ["metrics", *told]:
                self._scrapes.reported(child, *told)
            case ["scrape", number, dumped]:
                self._scrapes.reported(child, dumped)
                self._scrapes.begin(child, number, [one for one in self._children() if one.life and one.life.started])
            case ["started"]:
                self._has_started(life)
            case ["ready"]:
                self._is_ready(child, life)
            case ["failed", kind, reason]:
                life.failure = (kind, reason)
            case ["draining" | "ending" as state]:
                self._takes_no_more(child, life, state == "ending")

    def _has_started(self, life: Life) -> None:
        life.started = True
        if not self._announced:
            self._announce()
        if life.recipient is not None and not any(one.life and one.life.ready for one in self._workers):
            self._handover.join(life.recipient)  # better than that nobody says that everything still loads

    def _is_ready(self, child: Child, life: Life) -> None:
        life.ready = True
        if life.recipient is not None:
            self._handover.join(life.recipient)
        if child is self._engine:
            self._tell_engine()
        self._say_ready()

    def _takes_no_more(self, child: Child, life: Life, ending: bool) -> None:
        """A process drains, or ends; a worker that drains with all others keeps its connections."""
        life.ready = life.ready and child is not self._engine
        life.ending |= ending
        if life.recipient is not None and (life.ending or self._draining_since is None):
            self._handover.leave(life.recipient)
        if child is self._engine:
            self._tell_engine()

    # Start and end.

    def _announce(self) -> None:
        self._announced = True
        host, port = self._reloader.settings.server.host, self._sockets[0].getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        protocol = "http" if self.tls is None else "https"
        logs.logger.info(f"running on {protocol}://{shown}:{port} (Press CTRL+C to quit)", workers=len(self._workers))

    def _say_ready(self) -> None:
        if not self._said_ready and all(child.life and child.life.ready for child in self._children()):
            self._said_ready = True
            logs.logger.info("ready", workers=len(self._workers))

    def _asked_to_end(self) -> None:
        if self._draining_since is None:
            self._drain()
        else:
            self._broadcast("end")

    def _drain(self) -> None:
        self._draining_since = asyncio.get_running_loop().time()
        self._limiter.close()
        for worker in self._workers:
            worker.send("drain")
            life = worker.life
            if life is not None and life.recipient is not None and life.started and not life.ending:
                self._handover.join(life.recipient)  # it may have drained before; now it tells everybody so

    def _drained(self, now: float) -> bool:
        """Whether every process has ended: first the workers, then the engine, which answers for them."""
        if not any(worker.life for worker in self._workers) and not self._ends:
            self._ends = True
            self._handover.close()  # nobody will answer
            if self._engine is not None:
                self._engine.send("drain")
        assert self._draining_since is not None
        patience = self._reloader.settings.server.drain_timeout + END_SECONDS + CLOSING_SECONDS
        return not any(child.life for child in self._children()) or now - self._draining_since > patience

    def _broadcast(self, *message: Any) -> None:
        for child in self._children():
            child.send(*message)


def needs_engine(settings: Settings) -> bool:
    """Whether something must be in a process of its own: a local model, a strategy, stored responses or usage, also of
    keys that a reload brings.
    """
    strategies = any(isinstance(model, StrategySettings) for model in settings.models.values())
    local = any(backend.local for backend in settings.backends.values())
    return settings.cache.store or settings.cache.path is not None or strategies or local


def _secret(server: ServerSettings) -> str:
    """The secret of the salts, the same in all processes. Raises `ConfigurationError` for one that cannot be used."""
    if server.secret is None and server.secret_file is None:
        return secrets.token_hex(32)
    return server.read_secret().decode()


def _failure(child: Child) -> AgentSpecError:
    """The error that a process reported, or else that it ended."""
    if child.failure is not None:
        name, message = child.failure
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, AgentSpecError):
            return _made(kind, message)
        return ProcessFailedError(f"{child.name} cannot be started: {name}; the log says more")
    shown = "the engine's process" if child.name == "engine" else f"worker {child.name}"
    return ProcessFailedError(
        f"{shown} ended {child.failed_starts} times at its start, the last time with status {child.status};"
        " the log says more"
    )


def _made(kind: type[AgentSpecError], message: str) -> AgentSpecError:
    try:
        return kind(message)
    except TypeError:  # it wants more than a message
        return ProcessFailedError(message)
