"""Turns a coroutine that emits events into an iterator over these events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Generic, TypeVar

from agentspec.reasoning.speculative_task import cancel_tasks

T = TypeVar("T")


class EventSink(Generic[T]):
    """Takes a coroutine's events. `emit` returns once the reader asks for the next event, at the reader's pace."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[T | None] = asyncio.Queue()

    async def emit(self, event: T) -> None:
        self._events.put_nowait(event)
        await self._events.join()

    async def stream(self, run: Callable[[], Coroutine[Any, Any, None]]) -> AsyncGenerator[T]:
        """Call `run` and yield the events it emits. Closing the iterator cancels `run`. Raises what `run` raises."""
        task = asyncio.create_task(self._run(run))
        try:
            while (event := await self._events.get()) is not None:
                yield event
                self._events.task_done()
            await task
        finally:
            await cancel_tasks(task)

    async def _run(self, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await run()
        finally:
            self._events.put_nowait(None)
