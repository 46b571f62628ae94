"""Limits of API keys: requests and tokens of the last minute, by what a request is estimated to take and then took."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from starlette.requests import ClientDisconnect

from agentspec.backends.base import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from agentspec.errors import OverRateLimitError, RateLimitError
from agentspec.proxy.body.amounts import CHOICES
from agentspec.proxy.forwarding import expected_choices
from agentspec.proxy.request_record import BYTES_PER_TOKEN, RequestRecord
from agentspec.settings.server import RateLimits, ServerSettings
from agentspec.telemetry.metrics import Metrics

MEDIA_TOKENS = 1024  # of an image, a sound or a file, whatever bytes it takes
ANSWER_TOKENS = 256  # of an answer for which the request names no bound
_MOST = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens", "n_predict", "num_predict")
_MEDIA = "image image_url input_image input_audio audio_url video_url input_file file document".split()
_ANSWERED = frozenset((CHAT, COMPLETIONS, MESSAGES, RESPONSES))  # others return vectors, or what the body's texts score
_MARKS = (b"base64", b"input_audio")  # a body without them holds text alone


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

    def untold(self, arrived: int) -> int:
        """What stands for the tokens of an answer that told none, but of which so many arrived."""
        return self.prompt + (self.answer if self.bounded else max(self.answer, arrived))

    def within(self, limit: int | None) -> int:
        """What is charged under a limit: what is guessed of an answer makes no request too large for it."""
        whole = self.prompt + self.answer
        return whole if limit is None else min(whole, max(self.least, limit))


def demand_of(path: str, body: bytes, fields: Mapping[str, Any]) -> Demand:
    """What the request with this body, read as `fields`, will take. Never raises: its fields are not checked yet."""
    prompt = -(-_text_bytes(body, fields) // BYTES_PER_TOKEN)
    given = [value for name in _MOST if type(value := fields.get(name)) is int and value >= 0]
    if not given and path not in _ANSWERED:
        return Demand(prompt, 0)
    choices = expected_choices(path, fields)
    wanted = [value for name in CHOICES if type(value := fields.get(name)) is int and value > 0]
    each = max(given) if given else ANSWER_TOKENS
    answer = each * max(choices, *wanted, 1)
    return Demand(
        prompt, answer, bounded=bool(given), background=path == RESPONSES and fields.get("background") is True
    )


def may_hold_media(body: bytes) -> bool:
    """Whether `demand_of` looks at each value of the body, which takes a while if that is large."""
    return any(mark in body for mark in _MARKS)


def _text_bytes(body: bytes, fields: Mapping[str, Any]) -> int:
    """The bytes of the body, those of media left out and counted as so many tokens."""
    if not may_hold_media(body):
        return len(body)
    size, waiting = 0, [fields]
    while waiting:
        one: Any = waiting.pop()
        if isinstance(one, str):
            size += len(one.encode("utf-8", "replace"))
        elif isinstance(one, list):
            waiting += one
        elif not isinstance(one, Mapping):
            size += BYTES_PER_TOKEN
        elif one.get("type") in _MEDIA:
            size += MEDIA_TOKENS * BYTES_PER_TOKEN
        else:
            waiting += one.values()
    return size


WINDOW = 60  # seconds
Headers = tuple[tuple[bytes, bytes], ...]
Owner = tuple[str, str]
"""A key: its tenant, and its label among that tenant's keys."""


@dataclass(slots=True)
class SlidingWindow:
    """The sum of what was added in the last 60 whole seconds, the present one included.

    `now` is in whole seconds of a clock that never goes back.
    """

    total: int = 0
    _now: int = 0
    _slots: list[int] = field(default_factory=lambda: [0] * WINDOW)

    def advance(self, now: int) -> None:
        """Drop what is too old at `now`."""
        for second in range(self._now + 1, min(now, self._now + WINDOW) + 1):
            self.total -= self._slots[second % WINDOW]
            self._slots[second % WINDOW] = 0
        self._now = max(self._now, now)

    def add(self, amount: int) -> None:
        """Add to the present second."""
        self.total += amount
        self._slots[self._now % WINDOW] += amount

    def give_back(self, second: int, amount: int) -> None:
        """Take from `second` what was added there, unless it has gone already."""
        if self._now - WINDOW < second <= self._now:
            self.total -= amount
            self._slots[second % WINDOW] -= amount

    def wait(self, amount: int, limit: int) -> int:
        """Seconds until `amount` more, at most `limit`, stays within it if nothing else is added."""
        left, wait = self.total, 0
        while left + amount > limit and wait < WINDOW:
            wait += 1  # then the oldest second of those that are left is gone
            left -= self._slots[(self._now + wait) % WINDOW]
        return wait

    @property
    def reset(self) -> int:
        """Seconds until nothing is left."""
        return next((wait for wait in range(WINDOW, 0, -1) if self._slots[(self._now + wait) % WINDOW]), 0)


@dataclass(slots=True)
class KeyLimiter:
    """The requests and tokens of one key; `clock` is in seconds and never goes back. Not thread-safe.

    A request is charged what it will take by estimate when it begins, and what it took once it is over: what is too
    much goes back to the second in which it was charged, what is missing is added to the present one.
    """

    limits: RateLimits
    clock: Callable[[], float] = time.monotonic
    _requests: SlidingWindow = field(default_factory=SlidingWindow)
    _tokens: SlidingWindow = field(default_factory=SlidingWindow)

    def admit(self, demand: Demand) -> Callable[[int], None]:
        """Let a request begin. What is returned is to be called with the tokens that it took, when it is over.

        Raises `RateLimitError`, and `OverRateLimitError` if it asks for more than there will ever be; neither counts.
        """
        second, limit = self._advance(), self.limits.tokens_per_minute
        if limit and demand.least > limit:
            raise OverRateLimitError(
                f"the request takes about {demand.least} tokens with the longest answer that it allows, and its key has"
                f" tokens_per_minute = {limit}: send a shorter prompt, or ask for fewer (max_tokens)",
                param="max_tokens",
            )
        if limit and demand.background and not demand.bounded:
            raise OverRateLimitError(
                "the tokens of a response in the background are charged before it runs, since its key has"
                f" tokens_per_minute = {limit}: say max_output_tokens",
                param="max_output_tokens",
            )
        charged = demand.within(limit)
        self._require(1, charged)
        self._requests.add(1)
        self._tokens.add(charged)
        return lambda tokens: self._settle(second, charged, tokens)

    def _require(self, requests: int, tokens: int) -> None:
        waits = {
            name: window.wait(requests if window is self._requests else tokens, limit)
            for name, limit, window in self._limited()
        }
        name = max(waits, key=lambda one: waits[one], default="")
        if seconds := waits.get(name, 0):
            message = f"the limit of this API key is reached: {name} = {getattr(self.limits, name)};"
            raise RateLimitError(f"{message} try again in {seconds} s", limit=name, retry_after=seconds)

    def _settle(self, second: int, charged: int, tokens: int) -> None:
        self._advance()
        if tokens > charged:
            self._tokens.add(tokens - charged)
        else:
            self._tokens.give_back(second, charged - tokens)

    def _advance(self) -> int:
        now = int(self.clock())
        self._requests.advance(now)
        self._tokens.advance(now)
        return now

    def _limited(self) -> list[tuple[str, int, SlidingWindow]]:
        windows = (("requests_per_minute", self._requests), ("tokens_per_minute", self._tokens))
        return [(name, limit, window) for name, window in windows if (limit := getattr(self.limits, name))]

    def headers(self, *, anthropic: bool) -> Headers:
        """Where the key stands: limit, what is left, and when all is there again, as OpenAI or Anthropic says it."""
        found: list[tuple[str, str]] = []
        for name, limit, window in self._limited():
            kind, left = name.removesuffix("_per_minute"), str(max(0, limit - window.total))
            if anthropic:
                moment = datetime.fromtimestamp(int(time.time()) + window.reset, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                prefix = f"anthropic-ratelimit-{kind}-"
                found += [(f"{prefix}limit", str(limit)), (f"{prefix}remaining", left), (f"{prefix}reset", moment)]
            else:
                reset = "1m0s" if window.reset == WINDOW else f"{window.reset}s"
                values = (("limit", str(limit)), ("remaining", left), ("reset", reset))
                found += [(f"x-ratelimit-{what}-{kind}", value) for what, value in values]
        return tuple((name.encode(), value.encode()) for name, value in found)


class Metering:
    """The limits of all keys, and the counts of tokens by tenant; without keys it does nothing. For one event loop."""

    def __init__(self, settings: ServerSettings, metrics: Metrics) -> None:
        self._metrics, self._has_keys = metrics, bool(settings.api_keys)
        self._limiters = {owner: KeyLimiter(limits) for owner, limits in settings.limits_of_keys.items()}

    async def within_limits(
        self,
        record: RequestRecord,
        path: str,
        body: bytes,
        fields: Mapping[str, Any],
        run: Callable[..., Awaitable[Demand]],
    ) -> AbstractAsyncContextManager[None]:
        """What runs a request for a model. Entering it raises `RateLimitError` if the request has to come later, and
        `OverRateLimitError` if it asks for more than there will ever be.

        `run` is as of `BodyBudget`: what takes long for a large body is done in a thread.
        """
        if not self._has_keys or record.identity is None:
            return nullcontext()
        size = len(body) if may_hold_media(body) else 0
        return self._metered(record, await run(record.tenant, size, demand_of, path, body, fields))

    @asynccontextmanager
    async def _metered(self, record: RequestRecord, demand: Demand) -> AsyncIterator[None]:
        settle = self._admit(record, demand)
        failed = False
        try:
            yield
        except Exception as error:
            failed = not isinstance(error, ClientDisconnect)
            raise
        finally:
            settle(_taken(record, demand, failed=failed or record.failed))
            if record.usage is not None:
                counts = {"prompt": record.usage.prompt_tokens, "completion": record.usage.completion_tokens}
                self._metrics.tenant_tokens(record.tenant, **counts)

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
            record.limit_headers = limiter.headers(anthropic=record.anthropic)


def _taken(record: RequestRecord, demand: Demand, *, failed: bool) -> int:
    """The tokens that a request took: as the model reported them, else by what arrived of its answer. One that failed
    before any of it arrived is free.
    """
    if record.usage is not None:
        return record.tokens
    if failed:
        return demand.prompt + record.arrived if record.arrived else 0
    return demand.untold(record.arrived)
