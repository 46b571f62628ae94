"""Tasks that start before their results are known to be needed, and are cancelled if they are not."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

import anyio

T = TypeVar("T")


class SpeculativeTask(Generic[T]):
    """Holds at most one running task. Leaving the block cancels the task, also when the client disconnects."""

    def __init__(self) -> None:
        self._task: asyncio.Task[T] | None = None

    def __bool__(self) -> bool:
        return self._task is not None

    def start(self, work: Coroutine[Any, Any, T]) -> None:
        assert self._task is None, "one at a time"
        self._task = asyncio.create_task(work)

    async def result(self) -> T:
        """Wait for the task and return its result. Raises what the task raises."""
        assert self._task is not None
        try:
            return await task_result(self._task)
        finally:
            await self.cancel()

    async def cancel(self) -> None:
        """Cancel the task and wait until it has ended. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await cancel_tasks(task)

    async def __aenter__(self) -> SpeculativeTask[T]:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.cancel()


async def task_result(task: asyncio.Task[T]) -> T:
    """Wait for `task`, then return its result or raise its error. Cancelling the waiting does not cancel `task`."""
    await asyncio.wait([task])
    return task.result()


async def cancel_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel `tasks` and wait until all have ended; their results and errors are discarded.

    Each is cancelled only once, even if the caller is cancelled at every await, as by a gateway whose client has left:
    a second cancellation would interrupt a task that is closing its connections.
    """
    for task in tasks:
        task.cancel()
    if tasks:
        with anyio.CancelScope(shield=True):
            await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs an exception that was never retrieved
