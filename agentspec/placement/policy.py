"""What placement knows of a call and of a server, and the two policies that look at nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol


@dataclass(frozen=True, slots=True)
class Member:
    """A server of a pool as it was last seen. `load` is what every policy compares."""

    name: str
    weight: float = 1.0
    in_flight: int = 0
    """Calls that the gateway has sent and that have not ended."""
    others: int = 0
    """Requests of anyone else in the server, by its own metrics: of other gateways, other workers, other clients."""
    waiting: int = 0
    """Requests queued in the server, by its own metrics. They count twice, since a queue is worse than a batch."""
    kv_use: float = 0.0
    """Share of the server's KV cache in use, 0 to 1."""

    @property
    def calls(self) -> int:
        """What it carries."""
        return self.in_flight + self.others + self.waiting

    @property
    def load(self) -> float:
        """Calls per unit of weight."""
        return self.calls / self.weight


@dataclass(frozen=True, slots=True)
class Call:
    """What is known of a call before it is sent. The session is scoped by tenant already."""

    session: str | None = None
    blocks: Sequence[int] = ()
    """Hashes of the prompt's blocks, each of all text up to its end, so that equal prefixes have equal hashes."""


class PlacementPolicy(Protocol):
    """Chooses a member for each call. One instance serves one pool, in one thread."""

    reads_prompts: ClassVar[bool]
    """Whether it looks at the blocks of calls, which callers then compute before they ask."""

    def choose(self, call: Call, members: Sequence[Member]) -> Member:
        """One of `members`, which are those that may take a call now: never empty."""
        ...

    def placed(self, call: Call, member: Member) -> None:
        """The call has been sent to `member`, which may not be the one chosen."""
        ...

    def removed(self, name: str) -> None:
        """The member left the pool or lost what it had cached."""
        ...


class _Stateless:
    reads_prompts: ClassVar[bool] = False

    def placed(self, call: Call, member: Member) -> None:
        del call, member

    def removed(self, name: str) -> None:
        del name


class RoundRobin(_Stateless):
    """One after the other, in proportion to their weights (smooth weighted round robin, as in nginx)."""

    def __init__(self) -> None:
        self._credit: dict[str, float] = {}

    def choose(self, call: Call, members: Sequence[Member]) -> Member:
        del call
        for member in members:
            self._credit[member.name] = self._credit.get(member.name, 0.0) + member.weight
        chosen = max(members, key=lambda member: self._credit[member.name])
        self._credit[chosen.name] -= sum(member.weight for member in members)
        return chosen

    def removed(self, name: str) -> None:
        self._credit.pop(name, None)


class LeastLoaded(_Stateless):
    """The member with the fewest calls for its weight; of equals the one with the freest KV cache."""

    def choose(self, call: Call, members: Sequence[Member]) -> Member:
        del call
        return min(members, key=lambda member: (member.load, member.kv_use))
