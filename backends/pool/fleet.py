"""All pools of a gateway and their servers: built from settings, looked after, drained by operators."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from time import monotonic
from weakref import WeakSet

from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.pool.backend import PoolBackend
from agentspec.backends.pool.member import PoolMember
from agentspec.backends.pool.pool import Pool
from agentspec.backends.pool.servers import Servers
from agentspec.backends.pool.settings import FleetSettings, PoolSpec
from agentspec.backends.pool.watch import PoolWatch
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import InvalidRequestError
from agentspec.placement import POLICIES
from agentspec.telemetry.samples import MemberSample

_fleets: WeakSet[Fleet] = WeakSet()


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
        self.pools: dict[str, Pool] = {}
        for name in specs:
            self._build(name, specs, settings)
        self._first_look: asyncio.Future[list[None]] | None = None
        self._settings = settings
        self._watch = self._new_watch()
        self._of_parent: object = None
        _fleets.add(self)

    def _new_watch(self) -> PoolWatch:
        return PoolWatch(list(self.servers.values()), self._settings, monotonic)

    def leave_behind(self) -> None:
        """Begin anew in a forked process: what looks after the servers, and the calls to them, ran in the parent. That
        stays unfreed, as the loop is that it belongs to.
        """
        self._of_parent = self._first_look, self._watch
        self._first_look, self._watch = None, self._new_watch()
        for servers in self.servers.values():
            servers.leave_behind()

    def _build(self, name: str, specs: Mapping[str, PoolSpec], settings: FleetSettings) -> Pool:
        """The pool `name`, after those that it falls back on. The settings have refused cycles."""
        if name not in self.pools:
            spec = specs[name]
            chain: dict[Pool, None] = {}
            for other in spec.fallback:
                pool = self._build(other, specs, settings)
                chain |= dict.fromkeys((pool, *pool.fallbacks))
            targets = [(self.servers[target.backend], target.model) for target in spec.targets]
            policy = POLICIES[spec.placement]()
            pool = Pool(name, targets, policy, settings, fallbacks=tuple(chain))
            pool.prepare = self.begin
            self.pools[name] = pool
        return self.pools[name]

    @property
    def backends(self) -> dict[str, PoolBackend]:
        """The pools as backends; without those of one server that others only fall back on."""
        alone = {name for name, servers in self.servers.items() if not servers.settings.has_several_servers}
        return {name: PoolBackend(pool) for name, pool in self.pools.items() if name not in alone}

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

    def drain(self, name: str, *, on: bool) -> list[str]:
        """Send no new calls to the member `name`, or to all members of the backend `name`; or, with `on` false, again.
        Returns their names. Raises `InvalidRequestError` if there is none.
        """
        members = [one for servers in self.servers.values() for one in servers.drain(name, on=on)]
        if not members:
            known = ", ".join(member.name for member in self._members()) or "none"
            message = f"no pool has a member or a backend {name[:256]!r}; members: {known}"
            raise InvalidRequestError(message, param="name")
        return members

    def drained(self) -> list[str]:
        """The members that get no new calls."""
        return [member.name for member in self._members() if member.draining]

    def samples(self) -> list[MemberSample]:
        """How the members are now."""
        now = monotonic()
        return [member.sample(now) for member in self._members()]

    def _members(self) -> list[PoolMember]:
        return [member for servers in self.servers.values() for member in servers.members]


def _leave_all_behind() -> None:
    for fleet in list(_fleets):
        fleet.leave_behind()


os.register_at_fork(after_in_child=_leave_all_behind)
