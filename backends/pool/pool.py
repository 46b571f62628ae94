"""A pool: the servers that answer for one model, and where each call goes. The one place that asks a policy."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence

from agentspec.backends.pool.member import PoolMember
from agentspec.backends.pool.servers import Servers
from agentspec.backends.settings import FleetSettings
from agentspec.errors import NoServerError
from agentspec.placement import Call, PlacementPolicy

Clock = Callable[[], float]
_MOST_WAIT = 60.0  # seconds that a client is told to wait, at most


class Pool:
    """The servers of `targets`, each asked for its own model name.

    For one event loop. `clock` is in seconds; `rng` spreads retries.
    """

    def __init__(
        self,
        name: str,
        targets: Sequence[tuple[Servers, str | None]],
        policy: PlacementPolicy,
        fleet: FleetSettings,
        *,
        clock: Clock = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.name, self.targets, self.policy, self.fleet = name, tuple(targets), policy, fleet
        self.clock, self.rng = clock, rng or random.Random()
        self.prepare: Callable[[], Awaitable[None]] = _nothing
        for servers, _ in self.targets:
            servers.lost.append(policy.removed)

    @property
    def reads_prompts(self) -> bool:
        """Whether calls are placed by the blocks of their prompts."""
        return self.policy.reads_prompts

    def members(self) -> Iterator[tuple[PoolMember, str | None]]:
        """The members with the names by which they know the model."""
        for servers, model in self.targets:
            for member in servers.members:
                yield member, model

    def place(self, call: Call, tried: Collection[PoolMember] = ()) -> tuple[PoolMember, str | None] | None:
        """The server for `call`, and its name for the model, None to leave the name as it is: one that was not `tried`
        yet, if there is one; None if none takes calls.

        A first try also goes to a server that may be failing, if there is no better one; a retry does not.
        """
        now = self.clock()
        return self._choose(call, now, tried, False) or self._choose(call, now, (), not tried)

    def can_place(self, tried: Collection[PoolMember]) -> bool | None:
        """Whether a retry could be placed now: True at a server not `tried` yet, False at another one, None nowhere."""
        now = self.clock()
        taking = [member for member, _ in self.members() if member.takes_calls(now)]
        return any(member not in tried for member in taking) if taking else None

    def busy_until(self) -> float | None:
        """When the first of the servers that have asked to wait wants calls again; None if none has."""
        now = self.clock()
        return min((at for member, _ in self.members() if (at := member.busy_until(now)) is not None), default=None)

    def no_server(self) -> NoServerError:
        """The error for a call that cannot be placed."""
        now = self.clock()
        trials = [at for member, _ in self.members() if (at := member.trial_at(now)) is not None]
        wait = min(max(min(trials, default=now) - now, 1.0), _MOST_WAIT)
        return NoServerError("no server of this model takes calls now; try again later", retry_after=wait)

    def _choose(
        self, call: Call, now: float, tried: Collection[PoolMember], last_resort: bool
    ) -> tuple[PoolMember, str | None] | None:
        """One of the servers that take calls, besides those `tried`; for a first try also one that is erring, if there
        is no other.
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
        return member, model

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
