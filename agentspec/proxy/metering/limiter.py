"""Decides about the requests of one API key."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from agentspec.errors import OverRateLimitError, RateLimitError
from agentspec.proxy.metering.demand import Demand
from agentspec.proxy.metering.window import DayCount, SlidingWindow
from agentspec.settings.rate_limits import RateLimits

Standing = list[tuple[str, int, int, int]]
"""Where a key stands: of each kind of limit its name, the limit, what is left, and the seconds until all is there."""


@dataclass(frozen=True, slots=True)
class Clock:
    """`seconds` never goes back; `time` is in seconds since 1970."""

    seconds: Callable[[], float] = time.monotonic
    time: Callable[[], float] = time.time


@dataclass(frozen=True, slots=True)
class Ticket:
    """What was charged for a request that runs, and when."""

    second: int
    day: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a request may run: it may with a `ticket`, and else `refusal` says why not."""

    standing: Standing
    ticket: Ticket | None = None
    refusal: RateLimitError | OverRateLimitError | None = None


@dataclass(slots=True)
class KeyLimiter:
    """The requests and tokens of one key. Not thread-safe.

    A request is charged what it will take by estimate when it begins, and what it took in truth once it is over: what
    is too much goes back to the second in which it was charged, what is missing is added to the present one.
    """

    limits: RateLimits
    clock: Clock = field(default_factory=Clock)
    running: int = 0
    _requests: SlidingWindow = field(default_factory=SlidingWindow)
    _tokens: SlidingWindow = field(default_factory=SlidingWindow)
    _day: DayCount = field(default_factory=DayCount)

    def admit(self, demand: Demand) -> Verdict:
        """Let a request begin, or refuse it, which changes nothing. What follows a ticket is `settle`."""
        now, time_ = self._advance()
        tokens = demand.within(self._fewest_tokens)
        refusal = self._too_large(demand) or self._refusal(self._waits(tokens, time_))
        if refusal is not None:
            return Verdict(self._standing(time_), refusal=refusal)
        self._requests.add(1)
        self._tokens.add(tokens)
        self._day.reserved += tokens
        self.running += 1
        return Verdict(self._standing(time_), Ticket(now, self._day.day, tokens))

    def settle(self, ticket: Ticket, tokens: int) -> None:
        """A request is over that took so many tokens."""
        self._advance()
        self.running -= 1
        self._day.settle(ticket.day, ticket.tokens, tokens)
        if tokens > ticket.tokens:
            self._tokens.add(tokens - ticket.tokens)
        else:
            self._tokens.give_back(ticket.second, ticket.tokens - tokens)

    def recorded(self, day: int, amount: int, stored: int) -> None:
        """As of `DayCount`."""
        self._advance()
        self._day.recorded(day, amount, stored)

    def _advance(self) -> tuple[int, float]:
        now, time_ = int(self.clock.seconds()), self.clock.time()
        self._requests.advance(now)
        self._tokens.advance(now)
        self._day.advance(time_)
        return now, time_

    @property
    def _fewest_tokens(self) -> int | None:
        limits = (self.limits.tokens_per_minute, self.limits.tokens_per_day)
        return min((one for one in limits if one), default=None)

    def _too_large(self, demand: Demand) -> OverRateLimitError | None:
        for name in ("tokens_per_minute", "tokens_per_day"):
            limit = getattr(self.limits, name)
            if limit and demand.least > limit:
                return OverRateLimitError(
                    f"the request takes about {demand.least} tokens with the longest answer that it allows, and its key"
                    f" has {name} = {limit}: send a shorter prompt, or ask for fewer (max_tokens)",
                    param="max_tokens",
                )
        return None

    def _waits(self, tokens: int, time_: float) -> dict[str, int]:
        """The seconds that the request would have to wait, by limit."""
        limits, waits = self.limits, {}
        if limits.requests_per_minute:
            waits["requests_per_minute"] = self._requests.wait(1, limits.requests_per_minute)
        if limits.tokens_per_minute:
            waits["tokens_per_minute"] = self._tokens.wait(tokens, limits.tokens_per_minute)
        if limits.tokens_per_day:
            waits["tokens_per_day"] = self._day.wait(time_, tokens, limits.tokens_per_day)
        if limits.concurrent_requests:  # nobody knows when one of them ends
            waits["concurrent_requests"] = int(self.running >= limits.concurrent_requests)
        return waits

    def _refusal(self, waits: dict[str, int]) -> RateLimitError | None:
        name = max(waits, key=lambda one: waits[one], default="")
        if not waits.get(name):
            return None
        message = f"the limit of this API key is reached: {name} = {getattr(self.limits, name)};"
        seconds = waits[name]
        return RateLimitError(f"{message} try again in {seconds} s", limit=name, retry_after=seconds)

    def _standing(self, time_: float) -> Standing:
        limits, found = self.limits, []
        for kind, limit, window in (
            ("requests", limits.requests_per_minute, self._requests),
            ("tokens", limits.tokens_per_minute, self._tokens),
        ):
            if limit:
                found.append((kind, limit, max(0, limit - window.total), window.reset))
        if limits.tokens_per_day:
            left = max(0, limits.tokens_per_day - self._day.total)
            found.append(("tokens-day", limits.tokens_per_day, left, self._day.reset(time_)))
        return found
