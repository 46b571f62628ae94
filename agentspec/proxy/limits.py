"""Limits on requests: how many run at once and how long each may take; cancels those of disconnected clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, TypeVar, cast
from weakref import WeakSet

import anyio
from starlette.types import Receive

from agentspec.errors import AgentSpecError, OverloadedError, RequestTimeoutError, ShuttingDownError

T = TypeVar("T")


class ConcurrencyLimiter:
    """Bounds the number of running requests. After `close`, running requests finish and new ones are refused."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.running = 0
        self.closed = False
        self._deadlines: WeakSet[Deadline] = WeakSet()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Count as one running request. Raises `ShuttingDownError` or `OverloadedError` at once instead of waiting."""
        if self.closed:
            raise ShuttingDownError("the server is shutting down; send the request elsewhere or later")
        if self.running >= self.limit:
            raise OverloadedError(f"{self.limit} requests are being answered already (server.max_concurrent)")
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def close(self) -> None:
        self.closed = True

    def deadline(self, seconds: float) -> Deadline:
        """The time limit of one request, which `interrupt` can bring forward."""
        deadline = Deadline(seconds)
        self._deadlines.add(deadline)
        return deadline

    def interrupt(self, error: AgentSpecError) -> None:
        """End the running requests with `error`."""
        for deadline in tuple(self._deadlines):
            deadline.interrupt(error)


class Deadline:
    """The time limit of one request, which starts when the object is created, by the clock of the running loop."""

    def __init__(self, seconds: float) -> None:
        self._at = asyncio.get_running_loop().time() + seconds
        self._active: asyncio.Timeout | None = None
        self._error: AgentSpecError = RequestTimeoutError(
            f"no complete answer within {seconds:g} seconds (server.request_timeout)"
        )

    def interrupt(self, error: AgentSpecError) -> None:
        """End the time now, if it is not over; what is limited raises `error`."""
        now = asyncio.get_running_loop().time()
        if self._at <= now or (self._active is not None and self._active.expired()):
            return
        self._at, self._error = now, error
        if self._active is not None:
            self._active.reschedule(now)

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Raise `RequestTimeoutError`, or what `interrupt` was given, inside the block once the time is over."""
        limit = asyncio.timeout_at(self._at)
        try:
            async with limit:
                self._active = limit
                yield
        except TimeoutError:
            if limit.expired():
                raise self._error from None
            raise
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


@asynccontextmanager
async def until_disconnect(receive: Receive) -> AsyncIterator[anyio.CancelScope]:
    """Cancel the block when the client disconnects; `cancelled_caught` of the scope is then true.

    The body must have been read, so that `receive` can only report the disconnect.
    """
    with anyio.CancelScope() as scope:
        watcher = asyncio.create_task(_cancel_on_disconnect(receive, scope))
        try:
            yield scope
        finally:
            watcher.cancel()


async def _cancel_on_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
