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
        self._active: asyncio.Timeout | None = None

    def interrupt(self, error: AgentSpecError) -> None:
        """End the time now, if it is not over; what is limited raises `error`."""
        now = asyncio.get_running_loop().time()
        if self.at <= now:
            return
        self.at, self.error = now, error
        if self._active is not None and not self._active.expired():
            self._active.reschedule(now)

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """A context that raises `RequestTimeoutError`, or what `interrupt` was given, once the time is over."""
        timeout = self._active = asyncio.timeout_at(self.at)
        try:
            async with timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise self.error from None
        finally:
            self._active = None

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
