"""A pool: the servers that answer for one model, and where each call goes. The one place that asks a policy."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from agentspec.backends.pool.member import PoolMember
from agentspec.backends.pool.servers import Servers
from agentspec.backends.pool.settings import FleetSettings
from agentspec.errors import NoServerError
from agentspec.placement import Call, PlacementPolicy

Clock = Callable[[], float]
_MOST_WAIT = 60.0  # seconds that a client is told to wait, at most


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a call goes: a member of `pool`, asked for `model`; None leaves the name as it is."""

    pool: Pool
    member: PoolMember
    model: str | None


class Pool:
    """The servers of `targets`, each asked for its own model name. `fallbacks` are asked if none of them takes a call.

    For one event loop. `clock` is in seconds; `rng` spreads retries.
    """

    def __init__(
        self,
        name: str,
        targets: Sequence[tuple[Servers, str | None]],
        policy: PlacementPolicy,
        fleet: FleetSettings,
        *,
        fallbacks: Sequence[Pool] = (),
        clock: Clock = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.name, self.targets, self.policy, self.fleet = name, tuple(targets), policy, fleet
        self.fallbacks, self.clock, self.rng = tuple(fallbacks), clock, rng or random.Random()
        self.prepare: Callable[[], Awaitable[None]] = _nothing
        for servers, _ in self.targets:
            servers.lost.append(policy.removed)

    @property
    def reads_prompts(self) -> bool:
        """Whether calls are placed by the blocks of their prompts, here or at a fallback."""
        return any(pool.policy.reads_prompts for pool in (self, *self.fallbacks))

    def members(self) -> Iterator[tuple[PoolMember, str | None]]:
        """The members with the names by which they know the model."""
        for servers, model in self.targets:
            for member in servers.members:
                yield member, model

    def all_members(self) -> Iterator[PoolMember]:
        """The members, then those of the fallbacks."""
        for pool in (self, *self.fallbacks):
            for member, _ in pool.members():
                yield member

    def place(
        self, call: Call, tried: Collection[PoolMember] = (), *, passed_over: Collection[Pool] = ()
    ) -> Placed | None:
        """The server for `call`: one that was not `tried` yet, the pool's own first; None if none takes calls. No
        server of the fallbacks that are `passed_over`.

        A first try also goes to a server that may be failing, if there is no better one; a retry does not.
        """
        now = self.clock()
        for fresh, last_resort in ((True, False), (False, not tried)):
            for pool in self._but(passed_over):
                placed = pool.choose(call, now, tried if fresh else (), last_resort)
                if placed is not None:
                    return placed
        return None

    def can_place(self, tried: Collection[PoolMember], passed_over: Collection[Pool] = ()) -> bool | None:
        """Whether a retry could be placed now: True at a server not `tried` yet, False at another one, None nowhere."""
        now = self.clock()
        known = (member for pool in self._but(passed_over) for member, _ in pool.members())
        taking = [member for member in known if member.takes_calls(now)]
        return any(member not in tried for member in taking) if taking else None

    def _but(self, passed_over: Collection[Pool]) -> Iterator[Pool]:
        """This pool and its fallbacks, but those."""
        yield self
        yield from (pool for pool in self.fallbacks if pool not in passed_over)

    def busy_until(self) -> float | None:
        """When the first of its own servers that have asked to wait wants calls again; None if none has."""
        now = self.clock()
        return min((at for member, _ in self.members() if (at := member.busy_until(now)) is not None), default=None)

    def no_server(self) -> NoServerError:
        """The error for a call that cannot be placed."""
        now = self.clock()
        trials = [at for member, _ in self.members() if (at := member.trial_at(now)) is not None]
        wait = min(max(min(trials, default=now) - now, 1.0), _MOST_WAIT)
        return NoServerError("no server of this model takes calls now; try again later", retry_after=wait)

    def choose(self, call: Call, now: float, tried: Collection[PoolMember], last_resort: bool) -> Placed | None:
        """One of this pool's own servers that take calls, besides those `tried`; for a first try also one that is
        erring, if there is no other.
        """
        taking = self._taking(now, tried, last_resort)
        if not (taking or tried):
            taking = self._taking(now, tried, last_resort, erring=True)
        if not taking:
            return None
        if len(taking) == 1:
            (member, model), *_ = taking.values()
        else:
            chosen = self.policy.choose(call, [member.seen() for member, _ in taking.values()])
            member, model = taking[chosen.name]
        self.policy.placed(call, member.seen())
        return Placed(self, member, model)

    def _taking(
        self, now: float, tried: Collection[PoolMember], last_resort: bool, *, erring: bool = False
    ) -> dict[str, tuple[PoolMember, str | None]]:
        return {
            member.name: (member, model)
            for member, model in self.members()
            if member not in tried and member.takes_calls(now, erring=erring, last_resort=last_resort)
        }


async def _nothing() -> None:
    """Servers that are listed need no preparation."""
