"""The time that a request may take, and the end of requests whose clients have disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar, cast

import anyio
from starlette.types import Receive

from agentspec.errors import RequestTimeoutError

T = TypeVar("T")


class Deadline:
    """The time limit of one request, which starts when the object is created, by the clock of the running loop."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._at = asyncio.get_running_loop().time() + seconds

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Raise `RequestTimeoutError` inside the block once the time is over."""
        limit = asyncio.timeout_at(self._at)
        try:
            async with limit:
                yield
        except TimeoutError:
            if limit.expired():
                raise RequestTimeoutError(
                    f"no complete answer within {self._seconds:g} seconds (server.request_timeout)"
                ) from None
            raise

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
