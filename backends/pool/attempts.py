"""The tries of one call: at which servers, and whether there is another one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from types import TracebackType

from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.pool.member import PoolMember
from agentspec.backends.pool.pool import Pool
from agentspec.errors import (
    UpstreamError,
    UpstreamIsolationError,
    UpstreamStatusError,
    UpstreamTimeoutError,
)
from agentspec.placement import Call

UNAVAILABLE = frozenset({502, 503})
"""Statuses of a server that is not there. Any other 5xx may be the request's fault, and leaves the server out only
while there is another: else one client could close a model to all others."""
LATE = 504  # of a proxy before the server, which may be computing the answer
RETRIED = UNAVAILABLE | {429}
"""Statuses of answers after which another server may be asked: the call was not begun, or is not being computed."""
ELSEWHERE_SECONDS = 0.025  # before a try at another server, at most; doubled each time
MOST_BUSY = 600.0  # seconds that a `Retry-After` spares a server at most: one of a caller's quota may be a day
SAME_SECONDS = 0.2  # before another one at the same server, at most; doubled each time


class Attempts:
    """The tries of `call`, until one of them ends it:

        async for attempt in Attempts(pool, call, until):
            async with attempt:
                ...  # ask attempt.backend for attempt.model

    A try of which nothing came back is followed by another one, if the pool's limits allow it and it can begin before
    `until`, a time of the running loop. Otherwise its error passes. Raises `NoServerError` if no server takes calls.
    """

    def __init__(self, pool: Pool, call: Call, until: float) -> None:
        self.pool, self.call, self._until = pool, call, until
        self._tried: list[PoolMember] = []
        self._delay = 0.0
        self._begun = self._over = False
        self._last: UpstreamError | None = None

    def __aiter__(self) -> Attempts:
        return self

    async def __anext__(self) -> Attempt:
        if self._over:
            raise StopAsyncIteration
        if not self._begun:
            self._begun = True
            await self.pool.prepare()
        elif self._delay:
            await asyncio.sleep(self._delay)
            self._delay = 0.0
        placed = self.pool.place(self.call, self._tried)
        if placed is None:
            raise self._last or self.pool.no_server()
        self._over = True  # unless it fails
        return Attempt(self, *placed)

    def begin(self, member: PoolMember) -> bool:
        """Note that `member` is asked; returns whether this is a trial of its circuit breaker."""
        trial = member.begin(self.pool.clock(), retry=bool(self._tried))
        self._tried.append(member)
        return trial

    def another(self, error: UpstreamError) -> bool:
        """Whether the call is tried again after `error`; if so, the next iteration waits as long as it should."""
        delay = self._next_delay()
        if delay is None:
            return False
        self._delay, self._over, self._last = delay, False, error
        return True

    def _next_delay(self) -> float | None:
        """Seconds before the next try; None if there can be none."""
        pool, again = self.pool, len(self._tried)
        left = self._until - asyncio.get_running_loop().time()
        if again > pool.fleet.max_retries:
            return None
        spread = 2 ** (again - 1) * pool.rng.uniform(0.5, 1.0)
        elsewhere = pool.can_place(self._tried)
        if elsewhere is not None:
            delay = spread * (ELSEWHERE_SECONDS if elsewhere else SAME_SECONDS)
        else:
            at = pool.busy_until()
            if at is None:  # nobody waits for a circuit breaker: the caller is told at once
                return None
            delay = max(0.0, at - pool.clock()) + spread * ELSEWHERE_SECONDS
        return delay if delay < left else None


class Attempt:
    """One try, as a context: its end decides about the next one, and tells the server's health. See `Attempts`.

    `when_answered` is called once no other try can follow.
    """

    def __init__(self, attempts: Attempts, member: PoolMember, model: str | None) -> None:
        self._attempts, self._member = attempts, member
        self.model = model
        """The server's name for the model; None if it is the one that the caller knows."""
        self._told = self._again = self._answered = self._broken = self._trial = False
        self.when_answered: Callable[[], None] = lambda: None

    @property
    def backend(self) -> OpenAIBackend:
        return self._member.backend

    @property
    def member(self) -> str:
        """The server's name, which only operators may see."""
        return self._member.name

    @property
    def group(self) -> str:
        """The name of the server's backend."""
        return self._member.group

    async def __aenter__(self) -> Attempt:
        self._trial = self._attempts.begin(self._member)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None and not self._told:
            self._succeeded()
        elif isinstance(error, UpstreamError) and not (self._answered or self._again):
            self._failed(error)
        elif isinstance(error, UpstreamError) and self._answered:
            self.broke()
        self._member.end(told=self._told, trial=self._trial)
        return self._again

    def broke(self) -> None:
        """Note that an answer broke off, or ended with an error of the server's."""
        if not self._broken:
            self._broken = True
            self._member.failed(self._attempts.pool.clock(), erring=True)

    def answered(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        """Note that the head of an answer has come, or an error with its `body`. Unless this raises, the answer is the
        caller's, whatever it is.

        Raises `UpstreamStatusError` if the call is tried again instead, to be passed on to the end of the context.
        """
        if status >= 400:
            error = UpstreamStatusError(f"the upstream answered {status}", status=status, body=body, headers=headers)
            self._failed(error)
            self._broken = True  # and counted
            if self._again:
                raise error
        elif not self._told:
            self._succeeded()
        self._answered = True
        self.when_answered()

    def _succeeded(self) -> None:
        self._told = True
        self._member.succeeded(trial=self._trial)

    def _failed(self, error: UpstreamError) -> None:
        if isinstance(error, UpstreamIsolationError):  # a rule of ours, before a byte was sent
            self._again = self._attempts.another(error)
            return
        member, now = self._member, self._attempts.pool.clock()
        status = error.status if isinstance(error, UpstreamStatusError) else None
        wait = retry_after(error.headers) if isinstance(error, UpstreamStatusError) else None
        self._told = True
        late = status == LATE or (isinstance(error, UpstreamTimeoutError) and not error.retryable)
        if status is not None and status < 500:
            member.succeeded(trial=self._trial)  # the request was wrong, or there are too many, but the server is well
        else:
            erring = late or status not in (None, *UNAVAILABLE)
            member.failed(now, unreachable=error.retryable, erring=erring, trial=self._trial)
        if status in (429, 503) and wait is not None:
            member.asked_to_wait(now + min(wait, MOST_BUSY))
        may = error.retryable if status is None else status in RETRIED
        self._again = may and self._attempts.another(error)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds that a server wants callers to wait (RFC 9110, section 10.2.3, and OpenAI's header in ms)."""
    for name, factor in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) / factor
        except ValueError:
            continue
        if 0 <= seconds < float("inf"):
            return seconds
    try:
        return max(0.0, parsedate_to_datetime(headers.get("retry-after", "")).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None
