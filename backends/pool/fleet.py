"""All pools of a gateway and their servers: built from settings, and probed in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from agentspec.backends.http import MAX_LIST_BYTES
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.openai.metrics import parse_load
from agentspec.backends.pool.backend import PoolBackend
from agentspec.backends.pool.member import PoolMember, current_time
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
    """Looks at the servers in the background, in the event loop of the first call: which there are, whether they are
    alive, how busy they are. `running` are the looks under way, by the name of the server or of the backend.
    """

    def __init__(self, servers: Sequence[Servers]) -> None:
        self._servers = servers
        self._task: asyncio.Task[None] | None = None
        self.running: dict[str, asyncio.Task[None]] = {}

    def ensure(self) -> None:
        """Begin, unless it runs: another loop's task ended with its loop."""
        if self._task is None or self._task.done() or self._task.get_loop().is_closed():
            self.running.clear()
            self._look_around()
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def aclose(self) -> None:
        """End it, whichever loop it runs in. Idempotent."""
        task, self._task = self._task, None
        if task is None or task.get_loop().is_closed():
            return
        tasks = [task, *self.running.values()]
        for one in tasks:
            task.get_loop().call_soon_threadsafe(one.cancel)
        if task.get_loop() is asyncio.get_running_loop():
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            self._look_around()

    def _look_around(self) -> None:
        for servers in self._servers:
            if servers.is_due():
                self._begin(f"backends.{servers.name}", servers.refresh)
            for member in servers.members if servers.settings.probe else ():
                self._begin(member.name, partial(_look, member))

    def _begin(self, name: str, look: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin a look, at most one at a time for each server."""
        if name not in self.running:
            self.running[name] = task = asyncio.get_running_loop().create_task(look())
            task.add_done_callback(partial(self._ended, name))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        self.running.pop(name, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the look at %s failed", name, exc_info=error)


async def _look(member: PoolMember) -> None:
    """Whether it answers `GET /health`, with a status below 500: vLLM says 503 there once its engine is dead. Then what
    it is, so that no call has to ask, and how busy.
    """
    alive = False
    asked = member.backend.endpoint.send("GET", "/health", headers={}, above=True, probing=True)
    try:
        async with asyncio.timeout(LOOK_SECONDS), asked as response:
            alive = response.status < 500
    except (UpstreamError, TimeoutError):
        pass
    member.probed(alive=alive)
    if not alive or await member.backend.server_kind() not in ("vllm", "sglang"):
        return
    if current_time() < member.measure_at:
        return
    load = None
    try:
        async with asyncio.timeout(LOOK_SECONDS):
            content = await member.backend.endpoint.fetch(
                "GET", "/metrics", above=True, limit=MAX_LIST_BYTES, probing=True
            )
        load = parse_load(content.decode("utf-8", "replace"))
    except UpstreamStatusError:
        member.measure_at = current_time() + NO_METRICS_SECONDS
    except (UpstreamError, TimeoutError):
        pass
    member.measured(load)


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
        self._watch = PoolWatch(list(self.servers.values()))
        self.backends = {name: PoolBackend(self._build(spec, settings)) for name, spec in specs.items()}

    def _build(self, spec: PoolSpec, settings: FleetSettings) -> Pool:
        targets = [(self.servers[target.backend], target.model) for target in spec.targets]
        return Pool(spec.name, targets, POLICIES[spec.placement](), settings, self.begin)

    async def begin(self) -> None:
        """Look at the servers from now on, in this loop; returns once the first lookups of their names have ended."""
        self._watch.ensure()
        for servers in self.servers.values():
            if servers.is_dynamic and not servers.looked:
                look = self._watch.running.get(f"backends.{servers.name}")
                if look is not None and look.get_loop() is asyncio.get_running_loop():
                    await asyncio.wait([look])  # of several calls, any may be cancelled
                else:
                    await servers.refresh()

    async def aclose(self) -> None:
        """End the looks, and close the connections. Idempotent."""
        await self._watch.aclose()
        for servers in self.servers.values():
            await servers.aclose()

    def samples(self) -> list[MemberSample]:
        """How the members are now."""
        return [member.sample() for servers in self.servers.values() for member in servers.members]
