"""Places for requests that hold across processes: the parent gives them out, and a worker asks for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from starlette.types import Receive

from agentspec.errors import AgentSpecError, OverloadedError
from agentspec.proxy.admission.concurrency import ConcurrencyLimiter, Visit, closed, unpressed
from agentspec.proxy.admission.early_messages import EarlyMessages
from agentspec.proxy.admission.tenant_places import TenantPlaces
from agentspec.proxy.admission.turns import ProgramCall
from agentspec.settings.server import ServerSettings
from agentspec.telemetry.samples import TenantSample

Send = Callable[..., None]


@dataclass(slots=True)
class _InLine:
    tenant: TenantPlaces
    turn: asyncio.Future[None]
    visit: Visit
    timer: asyncio.TimerHandle


@dataclass(slots=True)
class WorkerPlaces:
    """What one worker's requests hold and wait for, in the parent. `send` sends a message to the worker.

    Requests have numbers, which the worker gives them. The answer to `take` is "go", "no" or "closed", or "wait" and
    one of them later. `pressed` is what the worker last said of the servers' KV caches.
    """

    limiter: ConcurrencyLimiter
    send: Send
    pressed: bool = False
    _held: dict[int, tuple[TenantPlaces, Visit]] = field(default_factory=dict)
    _waiting: dict[int, _InLine] = field(default_factory=dict)

    def take(self, number: int, name: str, call: Sequence[Any] | None = None) -> None:
        """Give a request of this tenant a place, or let it wait for one. `call` are the fields of its `ProgramCall`."""
        tenant = self.limiter.tenant(name)
        visit = Visit(None if call is None else ProgramCall(*call), asyncio.get_running_loop().time())
        urgency = self.limiter.note(tenant, visit)
        try:
            if self.limiter.try_take(tenant):
                self._go(number, tenant, visit)
                return
            turn = self.limiter.join(tenant, urgency)
        except AgentSpecError as error:
            self.limiter.forget(tenant, visit)
            self._refuse(number, error)
            return
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.limiter.queue_timeout, self._late, number)
        self._waiting[number] = _InLine(tenant, turn, visit, timer)
        turn.add_done_callback(lambda done: self._turn(number))
        self.send("wait", number)

    def leave(self, number: int) -> None:
        """Take back the place of a request that is over, or its place in the line."""
        held = self._held.pop(number, None)
        if held is not None:
            self.limiter.release(*held)
        waiting = self._waiting.pop(number, None)
        if waiting is not None:
            waiting.timer.cancel()
            self.limiter.leave(waiting.tenant, waiting.turn)
            self.limiter.forget(waiting.tenant, waiting.visit)

    def press(self, on: bool) -> None:
        """The servers' KV caches are nearly full now, or no longer."""
        self.pressed = on

    def leave_all(self) -> None:
        """Take everything back from a worker that is gone."""
        self.send, self.pressed = (lambda *message: None), False
        for number in [*self._waiting, *self._held]:
            self.leave(number)

    def _go(self, number: int, tenant: TenantPlaces, visit: Visit) -> None:
        visit.began = asyncio.get_running_loop().time()
        self._held[number] = tenant, visit
        self.send("go", number)

    def _turn(self, number: int) -> None:
        waiting = self._waiting.pop(number, None)
        if waiting is None:  # it has left, and gave back what it got
            return
        waiting.timer.cancel()
        error = waiting.turn.exception()
        if error is None:
            self._go(number, waiting.tenant, waiting.visit)
        else:
            self.limiter.forget(waiting.tenant, waiting.visit)
            self._refuse(number, error)

    def _late(self, number: int) -> None:
        waiting = self._waiting[number]
        if waiting.turn.done():
            return
        self.leave(number)
        self._refuse(number, self.limiter.too_late(waiting.tenant))

    def _refuse(self, number: int, error: BaseException) -> None:
        if isinstance(error, OverloadedError):
            self.send("no", number, error.message, error.retry_after)
        else:
            self.send("closed", number)


class SharedLimiter:
    """The admission of one worker, which asks the parent by `send`. `answered` is told what the parent says."""

    def __init__(self) -> None:
        self.running = 0
        self.closed = False
        self.send: Send = lambda *message: None
        self.pressed: Callable[[], bool] = unpressed
        self._told_pressed = False
        self._asked: dict[int, _Question] = {}
        self._number = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def enter(self, tenant: str, receive: Receive, call: ProgramCall | None = None) -> SharedPlace:
        """As of `ConcurrencyLimiter`."""
        return SharedPlace(self, tenant, receive, call)

    def ask(self, tenant: str, call: ProgramCall | None) -> _Question:
        if self.closed:
            raise closed()
        self._loop = loop = asyncio.get_running_loop()
        self._tell_pressed()
        self._number += 1
        turn = self._asked[self._number] = _Question(self._number, loop.create_future(), loop.create_future())
        self.send("take", self._number, tenant, *(() if call is None else (call.fields,)))
        return turn

    def answered(self, verdict: str, number: int, *reason: Any) -> None:
        """Take the parent's answer to a request's question."""
        turn = self._asked.get(number)
        if turn is None:  # it has left meanwhile
            return
        if not turn.first.done():
            turn.first.set_result(None)
        if verdict == "wait":
            return
        del self._asked[number]
        if turn.place.done():
            return
        if verdict == "go":
            turn.place.set_result(None)
        elif verdict == "no":
            turn.place.set_exception(OverloadedError(reason[0], retry_after=reason[1]))
        else:
            turn.place.set_exception(closed())

    def leave(self, turn: _Question) -> None:
        """Give back a place, or stop waiting."""
        self._asked.pop(turn.number, None)
        if turn.place.done() and not turn.place.cancelled():
            turn.place.exception()  # seen, or the loop would report it
        turn.place.cancel()
        self._tell_pressed()  # before: a place that is given back goes to another request
        self.send("leave", turn.number)

    def _tell_pressed(self) -> None:
        if (pressed := self.pressed()) != self._told_pressed:
            self._told_pressed = pressed
            self.send("press", pressed)

    def close(self) -> None:
        """Refuse all requests that have no place yet."""
        self.closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._refuse_waiting)

    def update(self, settings: ServerSettings) -> None:
        """Nothing to do: the limits are the parent's."""

    def samples(self) -> list[TenantSample]:
        """Nothing: the parent counts."""
        return []

    def _refuse_waiting(self) -> None:
        for turn in self._asked.values():
            if not turn.place.done():
                turn.place.set_exception(closed())
            if not turn.first.done():
                turn.first.set_result(None)


@dataclass(frozen=True, slots=True)
class _Question:
    """A request's question: `first` is done with the first answer, `place` once it has a place or is refused."""

    number: int
    first: asyncio.Future[None]
    place: asyncio.Future[None]

    @property
    def is_refused(self) -> bool:
        """Whether the parent has refused it a place; that of a waiting request can also fail for want of memory."""
        place = self.place
        return place.done() and not place.cancelled() and isinstance(place.exception(), OverloadedError)


class SharedPlace:
    """One request's place as an asynchronous context; its value replaces the `receive` that it was given."""

    __slots__ = ("_call", "_limiter", "_receive", "_tenant", "_turn")

    def __init__(self, limiter: SharedLimiter, tenant: str, receive: Receive, call: ProgramCall | None) -> None:
        self._limiter = limiter
        self._tenant = tenant
        self._receive = receive
        self._call = call

    async def __aenter__(self) -> Receive:
        limiter, receive = self._limiter, self._receive
        self._turn = turn = limiter.ask(self._tenant, self._call)
        try:
            await turn.first
            if not turn.place.done():  # then it can take a while, and the client may leave
                early = EarlyMessages(receive)
                await early.listen_until(turn.place, None)
                receive = early.receive
            turn.place.result()
        except BaseException:
            if not turn.is_refused:  # else the parent may not know
                limiter.leave(turn)
            raise
        limiter.running += 1
        return receive

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._limiter.running -= 1
        self._limiter.leave(self._turn)
