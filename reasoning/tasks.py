"""Waits for tasks that were started before it is known whether their results are needed, and cancels them."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import anyio

T = TypeVar("T")


async def task_result(task: asyncio.Task[T]) -> T:
    """Wait for `task`, then return its result or raise its error. Cancelling the waiting does not cancel `task`."""
    await asyncio.wait([task])
    return task.result()


async def cancel_tasks(*given: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait until all have ended; their results and errors are discarded.

    Each is cancelled only once, even if the caller is cancelled at every await, as by a gateway whose client has left:
    a second cancellation would interrupt a task that is closing its connections.
    """
    tasks = [task for task in given if task is not None]
    for task in tasks:
        task.cancel()
    if tasks:
        with anyio.CancelScope(shield=True):
            await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs an exception that was never retrieved
