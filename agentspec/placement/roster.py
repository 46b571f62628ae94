"""The members that may take a call, by name, with what all of them carry."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import overload

from agentspec.placement.policy import Member


class Roster(Sequence[Member]):
    """A sequence of members that also knows their total load, the freest one, and each by its name.

    `Roster.of(members)` costs O(n). Who keeps one and tells it of every change by `update` pays O(log n) a change, and
    a choice no longer depends on the number of members: `of` returns such a roster as it is.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = list(members)
        self._at = {member.name: place for place, member in enumerate(self._members)}
        self._calls = self._others = 0
        self._weight = 0.0
        for member in self._members:
            self._others += member.others
            self._calls += member.in_flight + member.others + member.waiting  # `calls`, in a third of the time
            self._weight += member.weight
        self._free: list[tuple[float, float, int]] = []  # a heap; entries that have changed since are passed over

    @classmethod
    def of(cls, members: Sequence[Member]) -> Roster:
        return members if isinstance(members, Roster) else cls(members)

    @overload
    def __getitem__(self, index: int) -> Member: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Member]: ...
    def __getitem__(self, index: int | slice) -> Member | Sequence[Member]:
        return self._members[index]

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    def find(self, name: str | None) -> Member | None:
        """The member of this name, None if it may not take a call now."""
        place = None if name is None else self._at.get(name)
        return None if place is None else self._members[place]

    def update(self, member: Member) -> None:
        """The member of this name is now as given; its weight has not changed. Raises `KeyError` for another name."""
        place = self._at[member.name]
        before = self._members[place]
        self._calls += member.calls - before.calls
        self._others += member.others - before.others
        self._members[place] = member
        if len(self._free) > 8 * len(self._members):
            self._free = []
        if self._free:
            heappush(self._free, (member.load, member.kv_use, place))

    def freest(self) -> Member:
        """The member with the fewest calls for its weight; of equals the one with the freest KV cache."""
        if not self._free:
            self._free = [(member.load, member.kv_use, place) for place, member in enumerate(self._members)]
            heapify(self._free)
        while True:
            load, kv_use, place = self._free[0]
            member = self._members[place]
            if member.load == load and member.kv_use == kv_use:
                return member
            heappop(self._free)

    @property
    def others_share(self) -> float:
        """Share of the calls that others have sent, 0 to 1."""
        return self._others / max(1, self._calls)

    def has_room(self, member: Member, factor: float) -> bool:
        """Whether `member` carries at most `factor` times what the others do for their weight, one call more included,
        rounded up.

        For a factor of at least 1 the freest member always has room (Mirrokni, Thorup and Zadimoghaddam 2016).
        """
        most = factor * member.weight * (self._calls + 1) / (self._weight + (factor - 1) * member.weight)
        return member.calls + 1 <= math.ceil(most)
