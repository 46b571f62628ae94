"""A worker: the gateway's application on connections that the parent accepted; local models are in another process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import anyio

from agentspec.errors import AgentSpecError, NotReadyError
from agentspec.proxy.app import ProcessContext, create_app
from agentspec.proxy.forwarding.engine_link import EngineLink
from agentspec.proxy.logs import logger
from agentspec.proxy.metering.metering import Metering
from agentspec.proxy.metering.usage_meter import UsageMeter
from agentspec.proxy.middleware import GatewayMiddleware
from agentspec.proxy.serving.connections import Connections
from agentspec.proxy.serving.listener import AcceptsConnections
from agentspec.proxy.workers.handover import HandedConnections
from agentspec.proxy.workers.key_limits import SharedKeyLimits
from agentspec.proxy.workers.member import MemberServer, report, run
from agentspec.proxy.workers.places import SharedLimiter
from agentspec.proxy.workers.process import Start, adopt, read_start
from agentspec.proxy.workers.stored import RemoteResponses
from agentspec.proxy.workers.usage import RemoteUsage
from agentspec.runtime import Runtime
from agentspec.settings.server import ServerSettings
from agentspec.telemetry.metrics import Metrics
from agentspec.telemetry.metrics_sum import MetricsSum, dump

SCRAPE_SECONDS = 5.0
UPSTREAM_METRICS = ("agentspec_upstream_",)  # the upstreams' own counts, which every worker could report


class WorkerServer(MemberServer):
    """Serves the connections that the parent hands over."""

    def __init__(self, start: Start) -> None:
        self._limiter = SharedLimiter()
        self._engine = EngineLink(start.engine) if start.engine is not None else None
        self._key_limits = SharedKeyLimits()
        server = start.settings.server
        process = ProcessContext(
            self._limiter,
            body_share(server),
            self._engine,
            self._scrape,
            start.since,
            self._tell_drain,
            Metering(self._key_limits, self._meter(start.engine)),
        )
        responses = None if start.engine is None else RemoteResponses(start.engine)
        runtime = Runtime(start.settings, local=False, responses=responses)
        app: GatewayMiddleware = create_app(runtime, start.settings, process=process)
        connections = Connections(server, start.capacity, processes=server.workers)
        super().__init__(app, start, connections)
        self._limiter.send = self._key_limits.send = self.channel.send
        self._handover = adopt(start.handover)
        self._scrapes: dict[int, asyncio.Future[list[str]]] = {}
        self._number = 0

    async def collect(self) -> str:
        return dump(self.app.metrics.registry, but=UPSTREAM_METRICS)

    def heard(self, name: str, *told: Any) -> None:
        if name in ("go", "wait", "no", "closed"):
            self._limiter.answered(name, *told)
        elif name == "limited":
            self._key_limits.answered(*told)
        elif name == "engine" and self._engine is not None:
            self._engine.ready = bool(told[0])
        elif name == "scraped":
            number, dumps = told
            waiting = self._scrapes.pop(number, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(dumps)
        elif name == "collect":
            self.channel.send("metrics", dump(self.app.metrics.registry, but=UPSTREAM_METRICS), *told)

    def listener(self, sockets: list[socket.socket]) -> AcceptsConnections:
        return HandedConnections(self._handover, self._taken, self._lost)

    def drain(self) -> None:
        self.channel.send("draining")
        super().drain()

    def _meter(self, engine: Path | None) -> UsageMeter | None:
        """What stores the usage in the process of the engine; nothing does without one."""
        if engine is None:
            return None
        remote = RemoteUsage(engine)
        return UsageMeter(lambda: remote, self._key_limits)

    def _tell_drain(self, name: str, on: bool) -> None:
        self.channel.send("drain member", name, on)

    def _taken(self, number: int, connection: socket.socket, address: str) -> Coroutine[Any, Any, None] | None:
        self.channel.send("opened", number)
        network = self.connections.admit(address)
        if network is None:  # the limit was lowered meanwhile
            connection.close()
            self.channel.send("closed connection", number)
            return None

        def release() -> None:
            self.connections.release(network)
            self.channel.send("closed connection", number)

        return self.open(connection, release)

    def _lost(self, number: int) -> None:
        """Let the parent close a connection that did not come: it would keep it, and the client would wait."""
        logger.error("a connection is closed: this process has too many open files")
        self.channel.send("opened", number)
        self.channel.send("closed connection", number)

    async def _scrape(self, metrics: Metrics) -> bytes:
        """The metrics of all processes, added up. Raises `NotReadyError` if the parent does not answer."""
        own = dump(metrics.registry)
        self._number += 1
        answer = self._scrapes[self._number] = asyncio.get_running_loop().create_future()
        self.channel.send("scrape", self._number, await self.collect())  # so that the sums never fall, if it dies now
        try:
            async with asyncio.timeout(SCRAPE_SECONDS):
                others = await answer
        except TimeoutError:
            raise NotReadyError("the other processes did not report their metrics; try again") from None
        return await anyio.to_thread.run_sync(_summed, [own, *others])


def body_share(server: ServerSettings) -> int:
    """The bytes that one worker may hold for bodies: its share, but with room for two of the largest."""
    return min(server.max_body_memory, max(server.max_body_memory // server.workers, 2 * server.max_body_bytes))


def main() -> None:
    """Run a worker in this process, which the parent has started."""
    start = read_start()
    try:
        server = WorkerServer(start)
    except AgentSpecError as error:
        report(start, error)
    run(server, [])


def _summed(dumps: Sequence[str]) -> bytes:
    total = MetricsSum()
    for one in dumps:
        total.add(one)
    return total.render()
