"""Work begun before it is known to be needed, and cancelled when it is not."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

import anyio

T = TypeVar("T")


class SpeculativeTask(Generic[T]):
    """At most one piece of work under way. Leaving the block cancels it, so that a client's going away does too."""

    def __init__(self) -> None:
        self._task: asyncio.Task[T] | None = None

    def __bool__(self) -> bool:
        return self._task is not None

    def start(self, work: Coroutine[Any, Any, T]) -> None:
        assert self._task is None, "one at a time"
        self._task = asyncio.create_task(work)

    async def result(self) -> T:
        """Wait for what is under way. Raises what it raises."""
        assert self._task is not None
        try:
            return await task_result(self._task)
        finally:
            await self.cancel()

    async def cancel(self) -> None:
        """Cancel what is under way and wait until it has ended. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await cancel_tasks(task)

    async def __aenter__(self) -> SpeculativeTask[T]:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.cancel()


async def task_result(task: asyncio.Task[T]) -> T:
    """What `task` gives or raises. Being cancelled while waiting leaves the task running: `cancel_tasks` ends it."""
    await asyncio.wait([task])
    return task.result()


async def cancel_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their end, whatever that is.

    Each is cancelled once, also where the waiting itself is cancelled, as by a gateway whose client has left, which
    does so at every await: a second time would break off how a task closes its connections.
    """
    for task in tasks:
        task.cancel()
    if tasks:
        with anyio.CancelScope(shield=True):
            await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieved, or asyncio logs it as never retrieved
