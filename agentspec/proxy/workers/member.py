"""What a worker and the engine's process have in common: the way to the parent, and an end that it decides."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from agentspec.backends.model_store import child
from agentspec.errors import AgentSpecError, ConfigurationError
from agentspec.proxy.logs import logger
from agentspec.proxy.middleware import GatewayMiddleware
from agentspec.proxy.serving.connections import Connections
from agentspec.proxy.serving.server import GatewayServer, end_process, spare_what_is_loaded
from agentspec.proxy.workers.channel import Channel, Message
from agentspec.proxy.workers.process import Start, adopt, unpacked
from agentspec.settings.load import Settings

PUSH_TICKS = 10  # of the main loop between two signs of life, with the metrics
ORPHANED_SECONDS = 10.0  # that a process has to end once its parent is gone


class MemberServer(GatewayServer):
    """A server of one of the gateway's processes.

    The parent tells it to drain, to end and to reload; signals only drain it. `collect` returns its metrics as text.
    """

    def __init__(self, app: GatewayMiddleware, start: Start, connections: Connections) -> None:
        super().__init__(app, start.settings, connections=connections)
        self.app = app
        self.channel = Channel(self._received, self._orphaned)
        self._socket = adopt(start.channel)
        self._told: str | None = None
        self._pushing: asyncio.Task[None] | None = None
        self._drained_members: dict[str, bool] = {}  # what was told of members of pools, by name
        self.orphaned = False  # the parent is gone
        app.loading.when_ready = self._ready

    # What the kinds of processes do in their own ways.

    async def collect(self) -> str:
        """The metrics of this process."""
        raise NotImplementedError

    def heard(self, name: str, *told: Any) -> None:
        """Take a further message of the parent's."""

    def reloaded(self, settings: Settings) -> None:
        """Take over the limits of other settings."""
        self.reloader.apply(settings)

    # The server.

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.channel.open(self._socket)
        await super().startup(sockets)
        self.channel.send("started")

    async def on_tick(self, counter: int) -> bool:
        if counter % PUSH_TICKS == PUSH_TICKS - 1:
            self.channel.send("alive")  # whatever keeps the metrics waiting
            if self._pushing is None or self._pushing.done():
                self._pushing = asyncio.get_running_loop().create_task(self._push())
        ends = await super().on_tick(counter)
        failure = self.app.loading.failure
        if failure is not None and self._told is None:
            self._told = type(failure).__name__
            self.channel.send("failed", self._told, str(failure))
            self.channel.flush()
        return ends

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.channel.send("ending")
        self.channel.flush()
        await super().shutdown(sockets)
        if self._pushing is not None:
            await asyncio.gather(self._pushing, return_exceptions=True)  # or it would come behind the last ones
        await self._push()
        self.channel.flush()

    async def _push(self) -> None:
        self.channel.send("metrics", await self.collect())

    def _log_started_message(self, listeners: Any) -> None:
        """Nothing: the parent says it once."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A terminal and a service manager signal every process; the parent, too, which then says what to do."""
        before = {sent: signal.signal(sent, signal.SIG_IGN) for sent in (signal.SIGINT, signal.SIGHUP)}
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._asked_to_end)
        try:
            yield
        finally:
            for sent, handler in before.items():
                signal.signal(sent, handler)

    def drain(self) -> None:
        if not self.draining:
            super().drain()

    def _asked_to_end(self, sig: int, frame: FrameType | None) -> None:
        self.drain()

    def _ready(self) -> None:
        spare_what_is_loaded()
        for name, on in self._drained_members.items():
            self._drain_member(name, on)
        self.channel.send("ready")

    def _received(self, message: Message) -> None:
        name, *told = message
        actions: dict[str, Callable[..., None]] = {
            "drain": self.drain,
            "drain member": self._drain_member,
            "end": self._end,
            "reload": self._reload,
        }
        if name in actions:
            actions[name](*told)
        else:
            self.heard(name, *told)

    def _end(self) -> None:
        self.app.limiter.close()
        self.app.loading.abort()
        self.should_exit = True

    def _reload(self, told: str) -> None:
        try:
            self.reloaded(unpacked(told))
        except ConfigurationError as error:
            logger.error("configuration not reloaded; the old one stays", reason=error.message)

    def _drain_member(self, name: str, on: bool) -> None:
        self._drained_members.pop(name, None)  # the last word comes last
        self._drained_members[name] = on
        fleet = self.app.runtime.fleet
        if fleet is not None:
            fleet.drain(name, on=on, found=False)

    def _orphaned(self) -> None:
        """End, since nobody gives out places any more."""
        if self.should_exit or self.draining:
            return
        logger.error("the parent process is gone")
        self.orphaned = True
        self._end()
        timer = threading.Timer(ORPHANED_SECONDS, end_process)
        timer.daemon = True
        timer.start()


def run(server: MemberServer, sockets: list[socket.socket]) -> None:
    """Run the server to its end, and end the process."""
    server.run(sockets)
    loading = server.app.loading
    child.end_all()
    if loading.left_behind:
        end_process()
    sys.exit(1 if loading.failure is not None else 0)


def report(start: Start, error: AgentSpecError) -> NoReturn:
    """Tell the parent why this process cannot start, and end it."""
    with adopt(start.channel) as channel:
        channel.sendall(json.dumps(["failed", type(error).__name__, str(error)]).encode() + b"\n")
    sys.exit(1)
