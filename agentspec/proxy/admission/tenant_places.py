"""The places of one tenant: how many it uses, who waits for one, and when its turn comes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from agentspec.placement.ordering import ArrivalOrder, CallQueue
from agentspec.settings.server import TenantLimits

_NEWEST = 0.1  # weight of the newest request in the mean of the times that requests hold their places
_FIRST_GUESS = 1.0  # seconds that a request holds its place, before anything is measured


@dataclass(slots=True)
class HoldingTime:
    """A running mean of the seconds that a request holds its place."""

    seconds: float = _FIRST_GUESS
    measured: bool = False

    def observe(self, seconds: float) -> None:
        self.seconds += (seconds - self.seconds) * (_NEWEST if self.measured else 1.0)
        self.measured = True


@dataclass(slots=True)
class TenantPlaces:
    """One tenant's places and its place in the fair order.

    `finish` is the tenant's virtual finish time (start-time fair queueing; Goyal, Vin and Cheng 1996): each admitted
    request moves it on by the time that the tenant's requests hold a place on average, divided by the tenant's weight.
    `refused` counts the requests that got no place.
    """

    name: str
    limits: TenantLimits = field(default_factory=TenantLimits)
    running: int = 0
    finish: float = 0.0
    refused: int = 0
    held: HoldingTime = field(default_factory=HoldingTime)
    waiting: CallQueue[asyncio.Future[None]] = field(default_factory=ArrivalOrder)

    @property
    def unused_reserve(self) -> int:
        """Reserved places that the tenant does not use now, and nobody else may."""
        return max(0, self.limits.reserved - self.running)

    @property
    def at_limit(self) -> bool:
        limit = self.limits.max_concurrent
        return limit is not None and self.running >= limit

    @property
    def active(self) -> bool:
        return self.running > 0 or len(self.waiting) > 0

    def charge(self, virtual_time: float) -> float:
        """Charge one admitted request, and return the virtual time at which it starts. Idle time earns no credit."""
        start = max(virtual_time, self.finish)
        self.finish = start + self.held.seconds / self.limits.weight
        return start
