"""The time that a request may take, and the end of requests whose clients have disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from weakref import WeakSet

from starlette.types import Receive

from agentspec.errors import AgentSpecError, RequestTimeoutError

T = TypeVar("T")


class Deadlines:
    """The deadlines of the running requests."""

    def __init__(self) -> None:
        self._running: WeakSet[Deadline] = WeakSet()

    def start(self, seconds: float) -> Deadline:
        """The time limit of one request, which `interrupt` can bring forward."""
        deadline = Deadline(seconds)
        self._running.add(deadline)
        return deadline

    def interrupt(self, error: AgentSpecError) -> None:
        """End the running requests with `error`."""
        for deadline in tuple(self._running):
            deadline.interrupt(error)


class Deadline:
    """The time limit of one request, which starts when the object is created, by the clock of the running loop."""

    def __init__(self, seconds: float) -> None:
        self.at = asyncio.get_running_loop().time() + seconds
        self.error: AgentSpecError = RequestTimeoutError(
            f"no complete answer within {seconds:g} seconds (server.request_timeout)"
        )
        self.active: TimeLimit | None = None

    def interrupt(self, error: AgentSpecError) -> None:
        """End the time now, if it is not over; what is limited raises `error`."""
        now = asyncio.get_running_loop().time()
        if self.at <= now:
            return
        self.at, self.error = now, error
        if self.active is not None:
            self.active.end_now()

    def limit(self) -> TimeLimit:
        """A context that raises `RequestTimeoutError`, or what `interrupt` was given, once the time is over."""
        return TimeLimit(self)

    async def within(self, items: AsyncIterator[T]) -> AsyncGenerator[T]:
        """Yield `items`; raises `RequestTimeoutError` once the time is over. Closes `items` on the way out."""
        async with aclosing(cast(Any, items)):
            while True:
                try:
                    async with self.limit():
                        item = await anext(items)
                except StopAsyncIteration:
                    return
                yield item


class TimeLimit:
    """What `asyncio.timeout_at` does, in a third of its time: it is entered for each delta of an answer."""

    __slots__ = ("_cancelling", "_deadline", "_expired", "_task", "_timer")

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._expired = False

    async def __aenter__(self) -> None:
        self._task = cast("asyncio.Task[Any]", asyncio.current_task())
        self._cancelling = self._task.cancelling()
        self._timer = self._start_timer()
        self._deadline.active = self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._timer.cancel()
        self._deadline.active = None
        if self._expired and self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError):
            raise self._deadline.error from None

    def end_now(self) -> None:
        if not self._expired:
            self._timer.cancel()
            self._timer = self._start_timer()

    def _start_timer(self) -> asyncio.Handle:
        loop, at = asyncio.get_running_loop(), self._deadline.at
        # A time that is over ends the block before it does anything else.
        return loop.call_soon(self._expire) if at <= loop.time() else loop.call_at(at, self._expire)

    def _expire(self) -> None:
        self._expired = True
        self._task.cancel()


@dataclass(slots=True)
class Watch:
    """Whether the client left, which ended the block that watched it."""

    left: bool = False


@asynccontextmanager
async def until_disconnect(receive: Receive) -> AsyncIterator[Watch]:
    """A context that is cancelled when the client disconnects; `left` of its value is then true.

    The body must have been read, so that `receive` can only report the disconnect.
    """
    watch, ended = Watch(), asyncio.timeout(None)
    try:
        async with ended:
            watching = asyncio.create_task(_end_with(receive, ended))
            try:
                yield watch
            finally:
                watching.cancel()
    except TimeoutError:
        if not ended.expired():
            raise
        watch.left = True


async def _end_with(receive: Receive, block: asyncio.Timeout) -> None:
    with suppress(asyncio.CancelledError):  # kept by this task, it would hold the frames that it passed
        while (await receive())["type"] != "http.disconnect":
            pass
        block.reschedule(asyncio.get_running_loop().time())
