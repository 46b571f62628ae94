"""The time that a request may take, and the end of requests whose clients have disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar, cast
from weakref import WeakSet

import anyio
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
        self._at = asyncio.get_running_loop().time() + seconds
        self._active: asyncio.Timeout | None = None
        self._error: AgentSpecError = RequestTimeoutError(
            f"no complete answer within {seconds:g} seconds (server.request_timeout)"
        )

    def interrupt(self, error: AgentSpecError) -> None:
        """End the time now; what is limited raises `error`."""
        self._at, self._error = asyncio.get_running_loop().time(), error
        if self._active is not None and not self._active.expired():
            self._active.reschedule(self._at)

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
