"""Which requests are admitted: the slots of each tenant, the time a request may take, and clients that leave."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from weakref import WeakSet

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from agentspec.errors import AgentSpecError, OverloadedError, RequestTimeoutError, ShuttingDownError
from agentspec.settings.server import ServerSettings, TenantLimits
from agentspec.telemetry.samples import TenantSample

MAX_QUEUED = 256  # requests of one tenant that may wait


@dataclass(slots=True)
class _TenantQueue:
    """One tenant's running requests, and those that wait (by deadline, then by arrival)."""

    limits: TenantLimits
    running: int = 0
    waiting: list[tuple[float, int, asyncio.Future[None]]] = field(default_factory=list)

    @property
    def turn(self) -> tuple[float, float, int]:
        """The tenant with the least is next: the one with the fewest slots for its weight."""
        deadline, number, _ = self.waiting[0]
        return self.running / self.limits.weight, deadline, number


class Slots:
    """Bounds the requests that run at once, in all and of each tenant. After `close` no further ones start.

    A free slot goes to the waiting tenant that has the fewest for its weight, and of its requests to the one with the
    nearest deadline, else the first that came. No request waits while a slot is free that its tenant may use, nor
    longer than `server.queue_timeout`. Use it in one event loop; only `close` may be called from other threads and from
    signal handlers.
    """

    def __init__(self, settings: ServerSettings, most: int | None = None) -> None:
        self.running = 0
        self.closed = False
        self._settings = settings
        self._most = most or settings.max_concurrent
        self._tenants = {name: _TenantQueue(limits) for name, limits in settings.tenants.items()}
        self._numbers = count()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def waiting(self) -> int:
        return sum(len(tenant.waiting) for tenant in self._tenants.values())

    @asynccontextmanager
    async def enter(self, name: str, deadline_s: float | None = None) -> AsyncIterator[Callable[[], None]]:
        """Hold a slot for a request of the tenant `name`, and wait for it if need be; at most `deadline_s` seconds.
        Yields what gives it back before the end.

        Raises `ShuttingDownError`, and `OverloadedError` if no slot is free in time.
        """
        if (tenant := self._tenants.get(name)) is None:
            tenant = self._tenants[name] = _TenantQueue(TenantLimits())
        if self.closed:
            raise _closed()
        if tenant.waiting or not self._has_room(tenant):
            await self._wait(tenant, math.inf if deadline_s is None else deadline_s)
        else:
            self._take(tenant)
        with ExitStack() as slot:
            slot.callback(self.give_back, tenant)
            yield slot.close

    def close(self) -> None:
        """Refuse all requests that have no slot yet."""
        self.closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._refuse_waiting)

    def samples(self) -> Iterator[TenantSample]:
        for name, one in list(self._tenants.items()):
            yield TenantSample(name, one.running, len(one.waiting))

    async def _wait(self, tenant: _TenantQueue, patience: float) -> None:
        settings, self._loop = self._settings, asyncio.get_running_loop()
        if settings.queue_timeout <= 0 or len(tenant.waiting) >= MAX_QUEUED:
            full = "the tenant's max_concurrent" if self.running < self._most else "server.max_concurrent"
            raise _refusal(f"{MAX_QUEUED} wait" if settings.queue_timeout > 0 else full)
        turn: asyncio.Future[None] = self._loop.create_future()
        heappush(tenant.waiting, (self._loop.time() + patience, next(self._numbers), turn))
        limit = asyncio.timeout(min(settings.queue_timeout, patience))
        try:
            async with limit:
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.give_back(tenant)  # it came just now
            else:
                tenant.waiting = [one for one in tenant.waiting if one[2] is not turn]
                heapify(tenant.waiting)
            if isinstance(error, TimeoutError) and limit.expired():
                raise _refusal("server.queue_timeout") from None
            raise

    def _has_room(self, tenant: _TenantQueue) -> bool:
        most = tenant.limits.max_concurrent
        return self.running < self._most and (most is None or tenant.running < most)

    def _take(self, tenant: _TenantQueue) -> None:
        tenant.running += 1
        self.running += 1

    def give_back(self, tenant: _TenantQueue) -> None:
        tenant.running -= 1
        self.running -= 1
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        """Give every free slot to a waiting request that may use it."""
        while ready := [one for one in self._tenants.values() if one.waiting and self._has_room(one)]:
            tenant = min(ready, key=lambda one: one.turn)
            *_, turn = heappop(tenant.waiting)
            if not turn.done():
                self._take(tenant)
                turn.set_result(None)

    def _refuse_waiting(self) -> None:
        for tenant in self._tenants.values():
            waiting, tenant.waiting = tenant.waiting, []
            for *_, turn in waiting:
                if not turn.done():
                    turn.set_exception(_closed())


def _refusal(setting: str) -> OverloadedError:
    return OverloadedError(f"too many requests at once: this one found no free slot in time ({setting})")


def _closed() -> ShuttingDownError:
    return ShuttingDownError("the server is shutting down; send the request elsewhere or later")


class Deadline:
    """The time limit of one request, which starts when the object is created, by the clock of the running loop. It is
    among the `running` ones until nothing refers to it.
    """

    def __init__(self, seconds: float, running: WeakSet[Deadline]) -> None:
        running.add(self)
        self.at = asyncio.get_running_loop().time() + seconds
        self._seconds = seconds
        self._interruption: AgentSpecError | None = None
        self._active: asyncio.Timeout | None = None

    def interrupt(self, error: AgentSpecError) -> None:
        """End the time now, if it is not over; what is limited raises `error`."""
        now = asyncio.get_running_loop().time()
        if self.at <= now:
            return
        self.at, self._interruption = now, error
        if self._active is not None:
            self._active.reschedule(now)

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """A context that raises `RequestTimeoutError`, or what `interrupt` was given, once the time is over."""
        limit = asyncio.timeout_at(self.at)
        try:
            async with limit:
                self._active = limit
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            seconds = f"{self._seconds:g} seconds (server.request_timeout)"
            raise self._interruption or RequestTimeoutError(f"no complete answer within {seconds}") from None
        finally:
            self._active = None


@asynccontextmanager
async def until_disconnect(receive: Receive) -> AsyncIterator[None]:
    """A context that is cancelled when the client disconnects, and then raises `ClientDisconnect`.

    The body must have been read, so that `receive` can only report the disconnect.
    """
    ended = asyncio.timeout(None)
    try:
        async with ended:
            watching = asyncio.create_task(_end_with(receive, ended))
            try:
                yield
            finally:
                watching.cancel()
    except TimeoutError:
        if not ended.expired():
            raise
        raise ClientDisconnect from None


async def _end_with(receive: Receive, block: asyncio.Timeout) -> None:
    with suppress(asyncio.CancelledError):  # held by this task, it would hold the frames that it passed
        while (await receive())["type"] != "http.disconnect":
            pass
        block.reschedule(asyncio.get_running_loop().time())
