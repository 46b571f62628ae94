"""A pool: the servers that answer for one model, where each call goes, and when it is tried again."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import TYPE_CHECKING

from agentspec.backends.pool.member import PoolMember, current_time
from agentspec.backends.settings import FleetSettings
from agentspec.errors import (
    NoServerError,
    UpstreamError,
    UpstreamIsolationError,
    UpstreamStatusError,
    UpstreamTimeoutError,
)
from agentspec.placement import Call, PlacementPolicy

if TYPE_CHECKING:
    from agentspec.backends.pool.fleet import Servers

UNAVAILABLE = frozenset({502, 503})
"""Statuses of a server that is not there. Any other 5xx may be the request's fault, and leaves the server out only
while there is another: else one client could close a model to all others."""
LATE = 504  # of a proxy in front of the server, which may be computing the answer
RETRIED = UNAVAILABLE | {429}
"""Statuses of answers after which another server may be asked: the call was not begun, or is not being computed."""
ELSEWHERE_SECONDS = 0.025  # before a try at another server, at most; doubled each time
SAME_SECONDS = 0.2  # before another one at the same server, at most; doubled each time
MOST_BUSY = 600.0  # seconds that a `Retry-After` spares a server at most: one of a caller's quota may be a day
MOST_WAIT = 60.0  # seconds in the `Retry-After` of the gateway's own, at most
Placed = tuple[PoolMember, str | None]


class Pool:
    """The servers of `targets`, each asked for its own model name. For one event loop. `prepare` is awaited before the
    first try of a call: it finds out the servers.
    """

    def __init__(
        self,
        name: str,
        targets: Sequence[tuple[Servers, str | None]],
        policy: PlacementPolicy,
        fleet: FleetSettings,
        prepare: Callable[[], Awaitable[None]],
    ) -> None:
        self.name, self.targets, self.policy, self.fleet, self.prepare = name, tuple(targets), policy, fleet, prepare
        self.reads_prompts = policy.reads_prompts
        for servers, _ in self.targets:
            servers.lost.append(policy.removed)

    def members(self) -> Iterator[Placed]:
        """The members with the names by which they know the model."""
        for servers, model in self.targets:
            for member in servers.members:
                yield member, model

    def place(self, call: Call, tried: Collection[PoolMember] = ()) -> Placed | None:
        """The server for `call`, and its name for the model, None to leave the name as it is: one that was not `tried`
        yet, if there is one; None if none takes calls.

        A first try also goes to a server that may be failing, if there is no better one; a retry does not.
        """
        now = current_time()
        first = not tried
        taking = self._taking(now, tried, last_resort=False) or (self._taking(now, (), erring=True) if first else [])
        taking = taking or self._taking(now, (), last_resort=first, erring=first)
        if not taking:
            return None
        if len(taking) == 1:
            [(member, model)] = taking
        else:
            named = {member.name: (member, model) for member, model in taking}
            chosen = self.policy.choose(call, [member.seen() for member, _ in named.values()])
            member, model = named[chosen.name]
        self.policy.placed(call, member.seen())
        return member, model

    def can_place(self, tried: Collection[PoolMember]) -> bool | None:
        """Whether a retry could be placed now: True at a server not `tried` yet, False at another one, None nowhere."""
        taking = self._taking(current_time())
        return any(member not in tried for member, _ in taking) if taking else None

    def busy_for(self) -> float | None:
        """Seconds until the first of the servers that have asked to wait wants calls again; None if none has."""
        now = current_time()
        times = [at for member, _ in self.members() if (at := member.busy_until(now)) is not None]
        return max(0.0, min(times) - now) if times else None

    def no_server(self) -> NoServerError:
        """The error for a call that cannot be placed."""
        now = current_time()
        trials = [at for member, _ in self.members() if (at := member.trial_at(now)) is not None]
        wait = min(max(min(trials, default=now) - now, 1.0), MOST_WAIT)
        return NoServerError("no server of this model takes calls now; try again later", retry_after=wait)

    def _taking(
        self, now: float, tried: Collection[PoolMember] = (), *, erring: bool = False, last_resort: bool = False
    ) -> list[Placed]:
        return [
            (member, model)
            for member, model in self.members()
            if member not in tried and member.takes_calls(now, erring=erring, last_resort=last_resort)
        ]


class Attempts:
    """The tries of `call`, until one of them ends it:

        async for attempt in Attempts(pool, call, until):
            async with attempt:
                ...  # ask attempt.backend for attempt.model

    A try without any answer is followed by another one, if the pool's limits allow it and it can begin before `until`,
    a time of the running loop. Otherwise its error is raised. Raises `NoServerError` if no server takes calls.
    """

    def __init__(self, pool: Pool, call: Call, until: float) -> None:
        self.pool, self.call, self._until = pool, call, until
        self.tried: list[PoolMember] = []
        self._delay: float | None = 0.0  # seconds before the next try; None if there is none
        self._last: UpstreamError | None = None

    def __aiter__(self) -> Attempts:
        return self

    async def __anext__(self) -> Attempt:
        if self._delay is None:
            raise StopAsyncIteration
        if self._last is None:
            await self.pool.prepare()
        elif self._delay:
            await asyncio.sleep(self._delay)
        placed = self.pool.place(self.call, self.tried)
        if placed is None:
            raise self._last or self.pool.no_server()
        self._delay = None  # unless it fails
        return Attempt(self, *placed)

    def another(self, error: UpstreamError) -> bool:
        """Whether the call is tried again after `error`; if so, the next iteration waits as long as it should."""
        self._last, self._delay = error, self._next_delay()
        return self._delay is not None

    def _next_delay(self) -> float | None:
        pool, again = self.pool, len(self.tried)
        if again > pool.fleet.max_retries:
            return None
        spread = 2 ** (again - 1) * random.uniform(0.5, 1.0)
        elsewhere = pool.can_place(self.tried)
        if elsewhere is not None:
            delay = spread * (ELSEWHERE_SECONDS if elsewhere else SAME_SECONDS)
        elif (busy := pool.busy_for()) is not None:
            delay = busy + spread * ELSEWHERE_SECONDS
        else:  # no call waits for a circuit breaker: the caller gets the error at once
            return None
        return delay if delay < self._until - asyncio.get_running_loop().time() else None


class Attempt:
    """One try, as a context: its end decides about the next one, and counts for the server's health. See `Attempts`.

    `model` is the server's name for the model, None if it is the one that the caller knows; `member` the server's name,
    for operators only; `group` the name of its backend. `when_answered` is called once no other try can follow.
    """

    def __init__(self, attempts: Attempts, member: PoolMember, model: str | None) -> None:
        self.backend, self.member, self.group, self.model = member.backend, member.name, member.group, model
        self.when_answered: Callable[[], None] = lambda: None
        self._attempts, self._member = attempts, member
        self._counted = self._again = self._answered = self._broken = self._trial = False

    async def __aenter__(self) -> Attempt:
        self._trial = self._member.begin(retry=bool(self._attempts.tried))
        self._attempts.tried.append(self._member)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None and not self._counted:
            self._succeeded()
        elif isinstance(error, UpstreamError) and self._answered:
            self.broke()
        elif isinstance(error, UpstreamError) and not self._again:
            self._failed(error)
        self._member.end(counted=self._counted, trial=self._trial)
        return self._again

    def broke(self) -> None:
        """Note that an answer broke off, or ended with an error of the server's."""
        if not self._broken:
            self._broken = True
            self._member.failed(erring=True)

    def answered(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        """Note that the head of an answer has come, or an error with its `body`. Unless this raises, the caller gets
        the answer, whatever it is.

        Raises `UpstreamStatusError` if the call is tried again instead, which the caller passes on to the context.
        """
        if status >= 400:
            error = UpstreamStatusError(f"the upstream answered {status}", status=status, body=body, headers=headers)
            self._failed(error)
            self._broken = True  # and counted
            if self._again:
                raise error
        elif not self._counted:
            self._succeeded()
        self._answered = True
        self.when_answered()

    def _succeeded(self) -> None:
        self._counted = True
        self._member.succeeded(trial=self._trial)

    def _failed(self, error: UpstreamError) -> None:
        if isinstance(error, UpstreamIsolationError):  # a rule of ours, before a byte was sent
            self._again = self._attempts.another(error)
            return
        status = error.status if isinstance(error, UpstreamStatusError) else None
        self._counted = True
        late = status == LATE or (isinstance(error, UpstreamTimeoutError) and not error.retryable)
        if status is not None and status < 500:
            self._member.succeeded(trial=self._trial)  # the request was wrong, or there are too many: it is well
        else:
            erring = late or status not in (None, *UNAVAILABLE)
            self._member.failed(unreachable=error.retryable, erring=erring, trial=self._trial)
        wait = retry_after(error.headers) if isinstance(error, UpstreamStatusError) else None
        if status in (429, 503) and wait is not None:
            self._member.asked_to_wait(min(wait, MOST_BUSY))
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
