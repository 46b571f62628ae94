"""The limits of all API keys of a gateway."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from agentspec.proxy.metering.demand import Demand
from agentspec.proxy.metering.limiter import Clock, KeyLimiter, Verdict
from agentspec.settings.server import ServerSettings

Owner = tuple[str, str]
"""A key: its tenant, and its label among that tenant's keys."""

Settle = Callable[[int], None]
"""Called once with the tokens that a request took, when it is over."""


class LimitsKeys(Protocol):
    """Admits requests within the limits of their keys: `KeyLimits` says what each of these does."""

    def has(self, owner: Owner) -> bool: ...

    async def admit(self, owner: Owner, demand: Demand) -> tuple[Verdict, Settle | None]: ...

    def recorded(self, day: int, amounts: Mapping[Owner, int], stored: Mapping[Owner, int]) -> None: ...

    def update(self, settings: ServerSettings) -> None: ...


@dataclass(slots=True)
class KeyLimits:
    """The limiters of all keys with limits, for one event loop."""

    clock: Clock = field(default_factory=Clock)
    _limiters: dict[Owner, KeyLimiter] = field(default_factory=dict)

    def has(self, owner: Owner) -> bool:
        """Whether the key has limits."""
        return owner in self._limiters

    async def admit(self, owner: Owner, demand: Demand) -> tuple[Verdict, Settle | None]:
        """Let a request of the key run, or refuse it. What is returned beside an admission is to be called."""
        return self.decide(owner, demand)

    def decide(self, owner: Owner, demand: Demand) -> tuple[Verdict, Settle | None]:
        """`admit`, which waits for nothing here."""
        limiter = self._limiters.get(owner)
        if limiter is None:  # its limits were just lifted
            return Verdict([]), None
        verdict = limiter.admit(demand)
        return verdict, None if verdict.ticket is None else partial(limiter.settle, verdict.ticket)

    def recorded(self, day: int, amounts: Mapping[Owner, int], stored: Mapping[Owner, int]) -> None:
        """Of the tokens that keys used on a day, `amounts` were stored just now, and all that is stored is `stored`."""
        for owner in amounts.keys() | stored.keys():
            if (limiter := self._limiters.get(owner)) is not None:
                limiter.recorded(day, amounts.get(owner, 0), stored.get(owner, 0))

    def update(self, settings: ServerSettings) -> None:
        """Apply the limits of `settings` from now on. What keys have used so far counts on."""
        before, self._limiters = self._limiters, {}
        for owner, limits in settings.limits_of_keys.items():
            limiter = self._limiters[owner] = before.get(owner) or KeyLimiter(limits, self.clock)
            limiter.limits = limits
