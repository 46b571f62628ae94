"""Admits requests to a bounded number of places, fairly between tenants; what finds none waits for a short time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from starlette.types import Receive

from agentspec.errors import OverloadedError, ShuttingDownError
from agentspec.placement.ordering import Urgency
from agentspec.proxy.admission.early_messages import EarlyMessages
from agentspec.proxy.admission.tenant_places import HoldingTime, TenantPlaces
from agentspec.proxy.admission.turns import ProgramCall, Turns
from agentspec.settings.server import ServerSettings, TenantLimits
from agentspec.telemetry.samples import TenantSample

LONGEST_RETRY = 60.0  # seconds that a refused client is told to wait at most


class Admission(Protocol):
    """Admits requests: `ConcurrencyLimiter` says what each of these does."""

    pressed: Callable[[], bool]

    @property
    def running(self) -> int: ...

    @property
    def closed(self) -> bool: ...

    def enter(
        self, tenant: str, receive: Receive, call: ProgramCall | None = None
    ) -> AbstractAsyncContextManager[Receive]: ...

    def update(self, settings: ServerSettings) -> None: ...

    def close(self) -> None: ...

    def samples(self) -> list[TenantSample]: ...


class ConcurrencyLimiter:
    """Bounds the running requests in all and of each tenant. After `close`, running requests finish and others do not
    start.

    A free place goes to the waiting tenant with the least virtual start time (start-time fair queueing), so that busy
    tenants share the places by their weights; a tenant's own requests are served by `server.order`. Nobody waits
    while a place is free that the tenant may use. A request is refused at once if it would wait longer than
    `server.queue_timeout` by the rate at which the tenant's requests get places.

    `pressed` tells whether the servers' KV caches are nearly full, which the order may heed.

    Use it in one event loop; only `close` may be called from other threads and from signal handlers. Errors call what
    bounds the places `setting`.
    """

    def __init__(self, settings: ServerSettings, *, setting: str = "server.max_concurrent") -> None:
        self.running = 0
        self.closed = False
        self.pressed: Callable[[], bool] = unpressed
        self._settings = settings
        self._setting = setting
        self._tenants: dict[str, TenantPlaces] = {}
        self._virtual_time = 0.0
        self._held = HoldingTime()  # of all tenants: what is assumed of a new one
        self._withheld = 0  # reserved places that their tenants do not use now
        self._waiting = 0
        self._turns = Turns(settings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.update(settings)

    @property
    def waiting(self) -> int:
        return self._waiting

    def update(self, settings: ServerSettings) -> None:
        """Apply the limits of `settings` from now on. Running requests keep their places, waiting ones their turn."""
        self._settings = settings
        for name in settings.tenants:
            self.tenant(name)
        for name, tenant in self._tenants.items():
            tenant.limits = settings.tenants.get(name) or TenantLimits()
        self._turns.update(settings, (tenant.waiting for tenant in self._tenants.values()))
        self._withheld = sum(tenant.unused_reserve for tenant in self._tenants.values())
        self._admit_waiting()

    def enter(self, tenant: str, receive: Receive, call: ProgramCall | None = None) -> Place:
        """Take a place for a request of `tenant` as an asynchronous context, and wait for it if need be. `call` tells
        which program it belongs to.

        The context's value replaces `receive`, which is listened to meanwhile, so that a client that leaves also leaves
        the queue. Raises `ShuttingDownError`, `OverloadedError` if no place is free in time, and `ClientDisconnect`.
        """
        return Place(self, self.tenant(tenant), receive, call)

    def close(self) -> None:
        """Refuse all requests that have no place yet."""
        self.closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._refuse_waiting)

    def samples(self) -> list[TenantSample]:
        """The counts of each tenant that was seen or configured."""
        return [
            TenantSample(one.name, one.running, len(one.waiting), one.refused) for one in list(self._tenants.values())
        ]

    # The steps of `enter`.

    def tenant(self, name: str) -> TenantPlaces:
        """The places of the tenant of this name."""
        found = self._tenants.get(name)
        if found is None:
            limits = self._settings.tenants.get(name) or TenantLimits()
            found = self._tenants[name] = TenantPlaces(
                name, limits, held=HoldingTime(self._held.seconds), waiting=self._turns.line()
            )
            self._withheld += found.unused_reserve
        return found

    def try_take(self, tenant: TenantPlaces) -> bool:
        """Take a place if one is free for `tenant` and it has no request that waits longer."""
        if self.closed:
            raise closed()
        if tenant.waiting or not self._may_enter(tenant):
            return False
        self._take(tenant, in_turn=not self._waiting)
        return True

    def note(self, tenant: TenantPlaces, visit: Visit) -> Urgency:
        """A request has come; how urgent it is. What follows is `release`, or `forget` if it gets no place."""
        return self._turns.sent(tenant.name, visit.call, visit.came)

    def forget(self, tenant: TenantPlaces, visit: Visit) -> None:
        """A request goes that was noted and had no place: nothing is learned from it."""
        self._turns.forget(tenant.name, visit.call, visit.came)

    async def wait(self, tenant: TenantPlaces, receive: Receive, urgency: Urgency) -> Receive:
        """Wait for a place, and take it."""
        turn = self.join(tenant, urgency)
        early = EarlyMessages(receive)
        try:
            await early.listen_until(turn, self.queue_timeout)
        except BaseException as error:
            self.leave(tenant, turn)
            if isinstance(error, TimeoutError):
                raise self.too_late(tenant) from None
            raise
        return early.receive

    def join(self, tenant: TenantPlaces, urgency: Urgency) -> asyncio.Future[None]:
        """Join the line; the result's end is the turn, with a place or `ShuttingDownError`. Raises `OverloadedError`.

        Whoever does not wait any longer calls `leave`.
        """
        self._require_short_wait(tenant)
        self._loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = self._loop.create_future()
        if not tenant.waiting:
            tenant.finish = max(tenant.finish, self._virtual_time)
        tenant.waiting.push(turn, urgency, self._loop.time())
        self._waiting += 1
        return turn

    def leave(self, tenant: TenantPlaces, turn: asyncio.Future[None]) -> None:
        """Undo the waiting of a request that goes away, or give back the place that it just got."""
        if tenant.waiting.remove(turn):
            self._waiting -= 1
        elif turn.done() and not turn.cancelled() and turn.exception() is None:
            self._give_back(tenant)

    @property
    def queue_timeout(self) -> float:
        """Seconds that a request may wait."""
        return self._settings.queue_timeout

    def too_late(self, tenant: TenantPlaces) -> OverloadedError:
        """What a request is refused with that has waited for `queue_timeout`."""
        return self._refusal(tenant, "got no place in time (server.queue_timeout)")

    def release(self, tenant: TenantPlaces, visit: Visit) -> None:
        """Give back the place of a request that is over."""
        now = asyncio.get_running_loop().time()
        seconds = now - visit.began
        self._turns.served(tenant.name, visit.call, waited=visit.began - visit.came, seconds=seconds, now=now)
        tenant.held.observe(seconds)
        self._held.observe(seconds)
        self._give_back(tenant)

    def _may_enter(self, tenant: TenantPlaces) -> bool:
        places = self._settings.max_concurrent
        if self.running >= places or tenant.at_limit:
            return False
        return tenant.running < tenant.limits.reserved or self.running + self._withheld < places

    def _take(self, tenant: TenantPlaces, *, in_turn: bool) -> None:
        """Count a request of `tenant` as running. Only requests admitted `in_turn` move the virtual time on: others
        take a place that those who wait may not use.
        """
        start = tenant.charge(self._virtual_time)
        if in_turn:
            self._virtual_time = start
        self._withheld -= tenant.running < tenant.limits.reserved
        tenant.running += 1
        self.running += 1

    def _give_back(self, tenant: TenantPlaces) -> None:
        tenant.running -= 1
        self.running -= 1
        self._withheld += tenant.running < tenant.limits.reserved
        if self._waiting:
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        """Give every free place to a waiting request that may use it."""
        now = 0.0 if self._loop is None else self._loop.time()
        while self._waiting and not self.closed:
            ready = [one for one in self._tenants.values() if one.waiting and self._may_enter(one)]
            if not ready:
                return
            tenant = min(ready, key=lambda one: max(self._virtual_time, one.finish))
            turn = tenant.waiting.pop(now, pressed=self.pressed())
            self._waiting -= 1
            if not turn.done():
                self._take(tenant, in_turn=True)
                turn.set_result(None)

    def _refuse_waiting(self) -> None:
        for tenant in self._tenants.values():
            self._waiting -= len(tenant.waiting)
            while tenant.waiting:
                if not (turn := tenant.waiting.pop(math.inf)).done():
                    turn.set_exception(closed())

    def _require_short_wait(self, tenant: TenantPlaces) -> None:
        """Raise `OverloadedError` for a request that would wait too long: it had better be refused at once."""
        timeout = self._settings.queue_timeout
        if timeout <= 0:
            own = tenant.at_limit and self.running < self._settings.max_concurrent
            setting = "the tenant's max_concurrent" if own else self._setting
            raise self._refusal(tenant, f"found no free place ({setting})")
        if len(tenant.waiting) >= self._settings.max_queued:
            raise self._refusal(tenant, "found too many others waiting (server.max_queued)")
        if tenant.held.measured and self._expected_wait(tenant) > timeout:
            raise self._refusal(tenant, "would wait too long for a place (server.queue_timeout)")

    def _expected_wait(self, tenant: TenantPlaces) -> float:
        """Seconds until a new request of `tenant` gets a place, by the places that are its share (Little's law)."""
        share = self._fair_share(tenant, (one for one in self._tenants.values() if one.active))
        return (len(tenant.waiting) + 1) * tenant.held.seconds / share

    def _fair_share(self, tenant: TenantPlaces, active: Iterable[TenantPlaces]) -> float:
        weights = tenant.limits.weight + sum(one.limits.weight for one in active if one is not tenant)
        share = self._settings.max_concurrent * tenant.limits.weight / weights
        share = max(1.0, share, tenant.limits.reserved, tenant.running)
        return min(share, tenant.limits.max_concurrent or share)

    def _refusal(self, tenant: TenantPlaces, reason: str) -> OverloadedError:
        tenant.refused += 1
        retry_after = min(max(1.0, self._expected_wait(tenant)), LONGEST_RETRY)
        return OverloadedError(f"too many requests at once: this one {reason}", retry_after=retry_after)


@dataclass(slots=True)
class Visit:
    """When a request came, and when it got its place, by the clock of the loop."""

    call: ProgramCall | None
    came: float
    began: float = 0.0


class Place:
    """One request's place as an asynchronous context. A class of its own, since it is entered by every request."""

    __slots__ = ("_limiter", "_receive", "_tenant", "_visit")

    def __init__(
        self, limiter: ConcurrencyLimiter, tenant: TenantPlaces, receive: Receive, call: ProgramCall | None
    ) -> None:
        self._limiter = limiter
        self._tenant = tenant
        self._receive = receive
        self._visit = Visit(call, 0.0)

    async def __aenter__(self) -> Receive:
        limiter, receive, visit = self._limiter, self._receive, self._visit
        loop = asyncio.get_running_loop()
        visit.came = loop.time()
        urgency = limiter.note(self._tenant, visit)
        try:
            if not limiter.try_take(self._tenant):
                receive = await limiter.wait(self._tenant, receive, urgency)
        except BaseException:
            limiter.forget(self._tenant, visit)
            raise
        visit.began = loop.time()
        return receive

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._limiter.release(self._tenant, self._visit)


def unpressed() -> bool:
    """What is assumed of KV caches that nobody has looked at."""
    return False


def closed() -> ShuttingDownError:
    """What a request gets during a drain."""
    return ShuttingDownError("the server is shutting down; send the request elsewhere or later")
