"""Limits of API keys: requests and tokens of the last minute, by what a request is estimated to take and then took."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentspec.backends.base import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from agentspec.errors import OverRateLimitError, RateLimitError
from agentspec.proxy.answer import BYTES_PER_TOKEN, RequestAnswer
from agentspec.proxy.body.amounts import CHOICES
from agentspec.proxy.body.budget import RequestBody
from agentspec.proxy.forwarding import expected_choices
from agentspec.settings.server import RateLimits, ServerSettings

WINDOW = 60  # seconds
REQUESTS, TOKENS = "requests_per_minute", "tokens_per_minute"
MEDIA_TOKENS = 1024  # of an image, a sound or a file in base64, whatever bytes it takes
ANSWER_TOKENS = 256  # of an answer for which the request names no bound
_MOST = ("max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens", "n_predict", "num_predict")
_ANSWERED = frozenset((CHAT, COMPLETIONS, MESSAGES, RESPONSES))  # others return vectors, or what the body's texts score
_MEDIA = re.compile(rb'(?:;base64,|"data"\s*:\s*")[A-Za-z0-9+/=_\\-]{2048,}')


@dataclass(frozen=True, slots=True)
class Demand:
    prompt: int
    answer: int
    bounded: bool = True  # the request itself says how long an answer may be
    background: bool = False  # the answer comes to another request

    def charged(self, limit: int) -> int:
        """What is charged under a limit: what is guessed of an answer makes no request too large for it.

        Raises `OverRateLimitError` for a request that may take more, whenever it comes.
        """
        if self.prompt + (self.answer if self.bounded else 0) > limit or (self.background and not self.bounded):
            name = "max_output_tokens" if self.background else "max_tokens"
            raise OverRateLimitError(
                f"the request may take more tokens than its key has, tokens_per_minute = {limit}: shorten the prompt"
                f" (about {self.prompt} tokens), or set {name} so that both fit",
                param=name,
            )
        return min(self.prompt + self.answer, limit)

    def taken(self, answer: RequestAnswer) -> int:
        """The tokens that the request took: as the model reported them, else by what arrived of an answer that broke
        off or whose client left. One that failed before any of it arrived is free.
        """
        if answer.usage is not None:
            return answer.usage.prompt_tokens + answer.usage.completion_tokens
        if answer.arrived and answer.outcome != "ok":
            return self.prompt + answer.arrived
        if answer.outcome not in ("ok", "cancelled"):
            return 0
        return self.prompt + (self.answer if self.bounded else max(self.answer, answer.arrived))


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
    """The sum of what was added in the last 60 whole seconds, the present one included; `limit` bounds it."""

    limit: int
    total: int = 0
    _added: dict[int, int] = field(default_factory=dict)  # by second, oldest first

    def add(self, second: int, amount: int) -> None:
        self._added[second] = self._added.get(second, 0) + amount
        self.total += amount

    def wait(self, now: int, amount: int) -> int:
        """Seconds until `amount` more, at most the limit, stays within it if nothing else is added.

        `now` is in whole seconds of a clock that never goes back; what is too old by then is dropped.
        """
        for second in [one for one in self._added if one <= now - WINDOW]:
            self.total -= self._added.pop(second)
        left, wait = self.total, 0
        for second, added in self._added.items():
            if left + amount <= self.limit:
                break
            left, wait = left - added, second + WINDOW - now
        return wait


class KeyLimiter:
    """The requests and tokens of one key; `clock` is in seconds and never goes back. Not thread-safe.

    A request is charged what it will take by estimate when it begins, and what it took once it is over: what is too
    much goes back to the second in which it was charged, what is missing is added to the present one.
    """

    def __init__(self, limits: RateLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._windows = {
            name: SlidingWindow(limit) for name in (REQUESTS, TOKENS) if (limit := getattr(limits, name)) is not None
        }

    def admit(self, demand: Demand) -> Callable[[int], None]:
        """Let a request begin. What is returned is to be called with the tokens that it took, when it is over.

        Raises `RateLimitError`, and `OverRateLimitError` if it asks for more than there will ever be; neither counts.
        """
        began, tokens = int(self._clock()), self._windows.get(TOKENS)
        charged = 0 if tokens is None else demand.charged(tokens.limit)
        amounts = {REQUESTS: 1, TOKENS: charged}
        waits = {name: window.wait(began, amounts[name]) for name, window in self._windows.items()}
        name = max(waits, key=lambda one: waits[one], default="")
        if seconds := waits.get(name, 0):
            message = f"the limit of this API key is reached: {name} = {self._windows[name].limit};"
            raise RateLimitError(f"{message} try again in {seconds} s", limit=name, retry_after=seconds)
        for name, window in self._windows.items():
            window.add(began, amounts[name])

        def correct(taken: int) -> None:
            now = int(self._clock())
            second = now if taken > charged else began
            if tokens is not None and second > now - WINDOW:
                tokens.add(second, taken - charged)

        return correct

    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """Where the key stands, in OpenAI's headers: limit, what is left, and when all is there again."""
        now, found = int(self._clock()), dict[str, str]()
        for name, window in self._windows.items():
            reset, kind = window.wait(now, window.limit), name.removesuffix("_per_minute")
            found[f"x-ratelimit-limit-{kind}"] = str(window.limit)
            found[f"x-ratelimit-remaining-{kind}"] = str(max(0, window.limit - window.total))
            found[f"x-ratelimit-reset-{kind}"] = "1m0s" if reset == WINDOW else f"{reset}s"
        return tuple((name.encode(), value.encode()) for name, value in found.items())


class Metering:
    def __init__(self, settings: ServerSettings) -> None:
        self._limiters = {owner: KeyLimiter(limits) for owner, limits in settings.limits_of_keys.items()}

    async def admit(self, answer: RequestAnswer, path: str, body: RequestBody) -> None:
        """Charge the request to its key, and have `answer` correct the charge at its end. Raises as
        `KeyLimiter.admit` does.
        """
        if answer.key is None or (limiter := self._limiters.get((answer.key.tenant, answer.key.key))) is None:
            return
        demand = await body.work(demand_of, path, body.data, body.fields)
        try:
            correct = limiter.admit(demand)
        finally:
            answer.limit_headers = limiter.headers()
        answer.correct_charge = lambda finished: correct(demand.taken(finished))
