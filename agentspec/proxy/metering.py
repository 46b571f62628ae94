"""Limits of API keys: requests and tokens of the last minute, by what a request is estimated to take and then took."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect

from agentspec.backends.base import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from agentspec.errors import OverRateLimitError, RateLimitError
from agentspec.proxy.body.amounts import CHOICES
from agentspec.proxy.body.budget import BodyBudget
from agentspec.proxy.forwarding import expected_choices
from agentspec.proxy.request_record import BYTES_PER_TOKEN, RequestRecord
from agentspec.settings.server import RateLimits, ServerSettings
from agentspec.telemetry.metrics import Metrics

WINDOW = 60  # seconds
REQUESTS, TOKENS = "requests_per_minute", "tokens_per_minute"
MEDIA_TOKENS = 1024  # of an image, a sound or a file in base64, whatever bytes it takes
ANSWER_TOKENS = 256  # of an answer for which the request names no bound
_MOST = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens", "n_predict", "num_predict")
_ANSWERED = frozenset((CHAT, COMPLETIONS, MESSAGES, RESPONSES))  # others return vectors, or what the body's texts score
_MEDIA = re.compile(rb'(?:;base64,|"data"\s*:\s*")[A-Za-z0-9+/=_\\-]{2048,}')
Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class Demand:
    """The tokens of a request's prompt and answers. `bounded`: the request itself says how long an answer may be.
    `background`: its answer comes to another request.
    """

    prompt: int
    answer: int
    bounded: bool = True
    background: bool = False

    @property
    def least(self) -> int:
        """What there must be room for: of an answer without a bound nobody knows."""
        return self.prompt + (self.answer if self.bounded else 0)

    def within(self, limit: int | None) -> int:
        """What is charged under a limit: what is guessed of an answer makes no request too large for it."""
        whole = self.prompt + self.answer
        return whole if limit is None else min(whole, max(self.least, limit))

    def taken(self, record: RequestRecord, *, failed: bool) -> int:
        """The tokens that the request took: as the model reported them, else by what arrived of its answer. One that
        failed before any of it arrived is free.
        """
        if record.usage is not None:
            return record.usage.prompt_tokens + record.usage.completion_tokens
        if failed:
            return self.prompt + record.arrived if record.arrived else 0
        return self.prompt + (self.answer if self.bounded else max(self.answer, record.arrived))


def demand_of(path: str, body: bytes, fields: Mapping[str, Any]) -> Demand:
    """What the request with this body, read as `fields`, will take. Never raises: its fields are not checked yet."""
    media = [len(one) for one in _MEDIA.findall(body)]
    prompt = -(-(len(body) - sum(media)) // BYTES_PER_TOKEN) + MEDIA_TOKENS * len(media)
    given = [value for name in _MOST if type(value := fields.get(name)) is int and value >= 0]
    if not given and path not in _ANSWERED:
        return Demand(prompt, 0)
    choices = [value for name in CHOICES if type(value := fields.get(name)) is int and value > 0]
    answer = (max(given) if given else ANSWER_TOKENS) * max(expected_choices(path, fields), *choices, 1)
    background = path == RESPONSES and fields.get("background") is True
    return Demand(prompt, answer, bounded=bool(given), background=background)


@dataclass(slots=True)
class SlidingWindow:
    """The sum of what was added in the last 60 whole seconds, the present one included; `limit` bounds it.

    `now` is in whole seconds of a clock that never goes back.
    """

    limit: int
    total: int = 0
    _added: deque[list[int]] = field(default_factory=deque)  # pairs of a second and an amount, oldest first

    def advance(self, now: int) -> None:
        """Drop what is too old at `now`."""
        while self._added and self._added[0][0] <= now - WINDOW:
            self.total -= self._added.popleft()[1]

    def add(self, now: int, amount: int) -> list[int]:
        """Add to the present second, whose sum is returned: who takes some of it back changes `total` alike."""
        if not self._added or self._added[-1][0] < now:
            self._added.append([now, 0])
        self._added[-1][1] += amount
        self.total += amount
        return self._added[-1]

    def wait(self, now: int, amount: int) -> int:
        """Seconds until `amount` more, at most the limit, stays within it if nothing else is added."""
        left, wait = self.total, 0
        for second, added in self._added:
            if left + amount <= self.limit:
                break
            left, wait = left - added, second + WINDOW - now
        return wait

    def reset(self, now: int) -> int:
        """Seconds until nothing is left."""
        return next((second + WINDOW - now for second, added in reversed(self._added) if added), 0)


class KeyLimiter:
    """The requests and tokens of one key; `clock` is in seconds and never goes back. Not thread-safe.

    A request is charged what it will take by estimate when it begins, and what it took once it is over: what is too
    much goes back to the second in which it was charged, what is missing is added to the present one.
    """

    def __init__(self, limits: RateLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        given = {name: getattr(limits, name) for name in (REQUESTS, TOKENS)}
        self._windows = {name: SlidingWindow(limit) for name, limit in given.items() if limit}

    def admit(self, demand: Demand) -> Callable[[int], None]:
        """Let a request begin. What is returned is to be called with the tokens that it took, when it is over.

        Raises `RateLimitError`, and `OverRateLimitError` if it asks for more than there will ever be; neither counts.
        """
        now, tokens = self._advance(), self._windows.get(TOKENS)
        if tokens is not None:
            _refuse_unbounded(demand, tokens.limit)
        amounts = {REQUESTS: 1, TOKENS: demand.within(None if tokens is None else tokens.limit)}
        waits = {name: window.wait(now, amounts[name]) for name, window in self._windows.items()}
        name = max(waits, key=lambda one: waits[one], default="")
        if seconds := waits.get(name, 0):
            message = f"the limit of this API key is reached: {name} = {self._windows[name].limit};"
            raise RateLimitError(f"{message} try again in {seconds} s", limit=name, retry_after=seconds)
        added = {name: window.add(now, amounts[name]) for name, window in self._windows.items()}
        return lambda taken: self._settle(added.get(TOKENS, []), amounts[TOKENS], taken)

    def _settle(self, added: list[int], charged: int, taken: int) -> None:
        now, tokens = self._advance(), self._windows.get(TOKENS)
        if tokens is None:
            return
        if taken > charged:
            tokens.add(now, taken - charged)
        elif added[0] > now - WINDOW:
            added[1] -= charged - taken
            tokens.total -= charged - taken

    def _advance(self) -> int:
        now = int(self._clock())
        for window in self._windows.values():
            window.advance(now)
        return now

    def headers(self) -> Headers:
        """Where the key stands, in OpenAI's headers: limit, what is left, and when all is there again."""
        now, found = int(self._clock()), dict[str, str]()
        for name, window in self._windows.items():
            reset, kind = window.reset(now), name.removesuffix("_per_minute")
            found[f"x-ratelimit-limit-{kind}"] = str(window.limit)
            found[f"x-ratelimit-remaining-{kind}"] = str(max(0, window.limit - window.total))
            found[f"x-ratelimit-reset-{kind}"] = "1m0s" if reset == WINDOW else f"{reset}s"
        return tuple((name.encode(), value.encode()) for name, value in found.items())


def _refuse_unbounded(demand: Demand, limit: int) -> None:
    """Raise `OverRateLimitError` for a request that can never be charged within `limit` tokens."""
    if demand.least > limit:
        raise OverRateLimitError(
            f"the request takes about {demand.least} tokens with the longest answer that it allows, and its key has"
            f" tokens_per_minute = {limit}: send a shorter prompt, or ask for fewer (max_tokens)",
            param="max_tokens",
        )
    if demand.background and not demand.bounded:
        raise OverRateLimitError(
            "the tokens of a response in the background are charged before it runs, since its key has"
            f" tokens_per_minute = {limit}: say max_output_tokens",
            param="max_output_tokens",
        )


class Metering:
    """The limits of all keys, and the counts of tokens by tenant. For one event loop."""

    def __init__(self, settings: ServerSettings, metrics: Metrics, budget: BodyBudget) -> None:
        self._metrics, self._budget = metrics, budget
        self._limiters = {owner: KeyLimiter(limits) for owner, limits in settings.limits_of_keys.items()}

    @asynccontextmanager
    async def within_limits(
        self, record: RequestRecord, path: str, body: bytes, fields: Mapping[str, Any]
    ) -> AsyncIterator[None]:
        """A context that runs a request for a model. Entering it raises as `KeyLimiter.admit` does."""
        demand = await self._budget.run(record.tenant, len(body), demand_of, path, body, fields)
        del body, fields  # an answer can take minutes
        settle = self._admit(record, demand)
        failed = False
        try:
            yield
        except Exception as error:
            failed = not isinstance(error, ClientDisconnect)
            raise
        finally:
            settle(demand.taken(record, failed=failed or record.failed))
            if (used := record.usage) is not None:
                self._metrics.tenant_tokens(record.tenant, prompt=used.prompt_tokens, completion=used.completion_tokens)

    def _admit(self, record: RequestRecord, demand: Demand) -> Callable[[int], None]:
        assert record.identity is not None
        limiter = self._limiters.get(record.identity.owner)
        if limiter is None:
            return lambda tokens: None
        try:
            return limiter.admit(demand)
        except RateLimitError as error:
            self._metrics.limited(record.tenant, error.limit)
            raise
        finally:
            record.limit_headers = limiter.headers()
