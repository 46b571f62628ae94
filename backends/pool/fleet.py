"""All pools of a gateway and their servers: built from settings, and looked after."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

from agentspec.backends.http import MAX_LIST_BYTES
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.openai.metrics import parse_load
from agentspec.backends.pool.backend import PoolBackend
from agentspec.backends.pool.member import PoolMember
from agentspec.backends.pool.pool import Pool
from agentspec.backends.pool.servers import Servers
from agentspec.backends.settings import FleetSettings, OpenAISettings, PoolSpec
from agentspec.errors import UpstreamError, UpstreamStatusError
from agentspec.placement import POLICIES
from agentspec.telemetry.samples import MemberSample

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 1.0  # between two looks at a server
LOOK_SECONDS = 2.0  # that one request of a look may take
NO_METRICS_SECONDS = 60.0  # until a server that shows no metrics is asked again


class PoolWatch:
    """Looks after the servers in the background, in the event loop of the first call: which there are, whether they
    live, how busy they are. No call waits for this, save the first one of a pool whose servers are not known yet.
    """

    def __init__(self, servers: Sequence[Servers], clock: Callable[[], float]) -> None:
        self._servers, self._clock = servers, clock
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: dict[str, asyncio.Task[None]] = {}  # by the name of the server, or of the backend

    def ensure(self) -> None:
        """Begin, if it does not run: another loop's task ended with its loop."""
        if self._task is None or self._task.done() or self._loop is None or self._loop.is_closed():
            self._loop = asyncio.get_running_loop()
            self._running.clear()
            self._task = self._loop.create_task(self._run())

    async def aclose(self) -> None:
        """End it, wherever it runs. Idempotent."""
        task, self._task = self._task, None
        if task is None or self._loop is None or self._loop.is_closed():
            return
        tasks = [task, *self._running.values()]
        if self._loop is not asyncio.get_running_loop():
            for one in tasks:
                self._loop.call_soon_threadsafe(one.cancel)
            return
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            now = self._clock()
            for servers in self._servers:
                if servers.is_due(now):
                    self._begin(f"backends.{servers.name}", servers.refresh)
                for member in servers.members if servers.settings.probe else ():
                    self._begin(member.name, partial(self._look, member))
            await asyncio.sleep(INTERVAL_SECONDS)

    def _begin(self, name: str, work: Callable[[float], Coroutine[Any, Any, None]]) -> None:
        """Begin a look, at most one at a time for each server."""
        if name not in self._running:
            self._running[name] = task = asyncio.get_running_loop().create_task(work(self._clock()))
            task.add_done_callback(lambda ended: self._ended(name, ended))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        self._running.pop(name, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("looking after %s failed", name, exc_info=error)

    async def _look(self, member: PoolMember, now: float) -> None:
        """Whether it answers, whatever below 500; then what it is, so that no call has to ask, and how busy."""
        alive = await is_alive(member)
        member.probed(self._clock(), alive=alive)
        if alive:
            kind = await member.backend.server_kind()
            if kind in ("vllm", "sglang") and now >= member.measure_at:
                await self._measure(member)

    async def _measure(self, member: PoolMember) -> None:
        asked = member.backend.endpoint.fetch("GET", "/metrics", above=True, limit=MAX_LIST_BYTES, probing=True)
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                content = await asked
        except (UpstreamError, TimeoutError) as error:
            member.measured(None)
            if isinstance(error, UpstreamStatusError):
                member.measure_at = self._clock() + NO_METRICS_SECONDS
            return
        member.measured(parse_load(content.decode("utf-8", "replace")))


async def is_alive(member: PoolMember) -> bool:
    """Whether the server answers `GET /health` in time: vLLM says 503 there once its engine is dead."""
    asked = member.backend.endpoint.send("GET", "/health", headers={}, above=True, probing=True)
    try:
        async with asyncio.timeout(LOOK_SECONDS), asked as response:
            return response.status < 500
    except (UpstreamError, TimeoutError):
        return False


class Fleet:
    """The pools of `specs`, by name, made of the backends that they name.

    `ready` are backends with one address that exist already. Nothing is done in the background before `begin`.
    """

    def __init__(
        self,
        specs: Mapping[str, PoolSpec],
        backends: Mapping[str, OpenAISettings],
        ready: Mapping[str, OpenAIBackend],
        settings: FleetSettings,
    ) -> None:
        used = dict.fromkeys(target.backend for spec in specs.values() for target in spec.targets)
        self.servers = {name: Servers(name, backends[name], settings, ready.get(name)) for name in used}
        self.pools = {name: self._build(spec, settings) for name, spec in specs.items()}
        self._first_look: asyncio.Future[list[None]] | None = None
        self._watch = PoolWatch(list(self.servers.values()), monotonic)

    def _build(self, spec: PoolSpec, settings: FleetSettings) -> Pool:
        targets = [(self.servers[target.backend], target.model) for target in spec.targets]
        pool = Pool(spec.name, targets, POLICIES[spec.placement](), settings)
        pool.prepare = self.begin
        return pool

    @property
    def backends(self) -> dict[str, PoolBackend]:
        """The pools as backends."""
        return {name: PoolBackend(pool) for name, pool in self.pools.items()}

    async def begin(self) -> None:
        """Look after the servers from now on, in this loop; returns once all have been looked for a first time."""
        unknown = [servers for servers in self.servers.values() if servers.is_dynamic and not servers.looked]
        if unknown and not self._is_looking():
            now = monotonic()
            self._first_look = asyncio.gather(*(servers.refresh(now) for servers in unknown))
        self._watch.ensure()
        if unknown and self._first_look is not None:
            await asyncio.shield(self._first_look)  # of several calls, the first may go away

    def _is_looking(self) -> bool:
        """Whether the first look is under way, in this loop: another one's ended with its loop."""
        look = self._first_look
        return look is not None and not look.done() and look.get_loop() is asyncio.get_running_loop()

    async def aclose(self) -> None:
        """End the looking after, and close the connections. Idempotent."""
        await self._watch.aclose()
        for servers in self.servers.values():
            await servers.aclose()

    def samples(self) -> list[MemberSample]:
        """How the members are now."""
        now = monotonic()
        return [member.sample(now) for servers in self.servers.values() for member in servers.members]
