"""Looks after the servers in the background: which there are, whether they live, how busy they are.

No call ever waits for this, save the first one of a pool whose servers are not known yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from agentspec.backends.http import MAX_LIST_BYTES
from agentspec.backends.pool.load import parse_load
from agentspec.backends.pool.member import PoolMember
from agentspec.backends.pool.servers import Servers
from agentspec.backends.pool.settings import FleetSettings
from agentspec.errors import UpstreamError, UpstreamStatusError

logger = logging.getLogger(__name__)
TICK_SECONDS = 0.25
LOOK_SECONDS = 2.0  # that one look at a server may take
METRICS_SECONDS = 1.0  # between two readings of its metrics
NO_METRICS_SECONDS = 60.0  # until a server that shows no metrics is asked again


class PoolWatch:
    """The task that does it, in the event loop of the first call. `clock` is in seconds."""

    def __init__(self, servers: Sequence[Servers], settings: FleetSettings, clock: Callable[[], float]) -> None:
        self._servers, self._settings, self._clock = servers, settings, clock
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due: dict[tuple[str, str], float] = {}  # of what, for which member
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}

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
            try:
                self.tick()
            except Exception:  # one odd answer must not end the looking after all servers
                logger.exception("looking after the servers failed")
            await asyncio.sleep(TICK_SECONDS)

    def tick(self) -> None:
        """Begin everything that is due, at most once at a time for each server."""
        now = self._clock()
        for servers in self._servers:
            if servers.is_due(now):
                self._begin(("servers", servers.name), servers.refresh(now))
            for member in servers.members:
                if servers.settings.probe:
                    self._look_after(member, now)
        self._forget_gone()

    def _forget_gone(self) -> None:
        there = {member.name for servers in self._servers for member in servers.members}
        self._due = {key: at for key, at in self._due.items() if key[1] in there}

    def _look_after(self, member: PoolMember, now: float) -> None:
        probe, metrics = ("probe", member.name), ("metrics", member.name)
        if now >= self._due.get(probe, 0.0) and probe not in self._running:
            self._due[probe] = now + self._settings.probe_interval
            self._begin(probe, self._probe(member))
        if member.kind in ("vllm", "sglang") and now >= self._due.get(metrics, 0.0) and metrics not in self._running:
            self._due[metrics] = now + METRICS_SECONDS
            self._begin(metrics, self._measure(member))

    def _begin(self, key: tuple[str, str], work: Coroutine[Any, Any, None]) -> None:
        if key in self._running:
            work.close()
            return
        task = self._running[key] = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(lambda ended: self._ended(key, ended))

    def _ended(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        self._running.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("looking after %s failed", " of ".join(key), exc_info=error)

    async def _probe(self, member: PoolMember) -> None:
        """Whether it answers, whatever below 500. Then what it is, so that no call has to ask."""
        alive = await is_alive(member)
        member.probed(self._clock(), alive=alive)
        if alive:
            member.kind = await member.backend.server_kind()

    async def _measure(self, member: PoolMember) -> None:
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                content = await member.backend.endpoint.fetch(
                    "GET", "/metrics", above=True, limit=MAX_LIST_BYTES, probing=True
                )
        except (UpstreamError, TimeoutError) as error:
            member.measured(None)
            if isinstance(error, UpstreamStatusError):
                self._due["metrics", member.name] = self._clock() + NO_METRICS_SECONDS
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
