"""Threads for blocking work that tenants share fairly: parsing large bodies, tokenizing long prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from agentspec.errors import ShuttingDownError

T = TypeVar("T")


class TenantThreads:
    """Runs functions in `threads` threads. Of an event loop's tenants none takes the last one unless there is only one.

    A tenant has no more work in the threads' queue than it may run, so that tenants take turns. Each tenant's work
    starts in order of arrival.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._share = max(1, threads - 1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._gates: WeakValueDictionary[tuple[asyncio.AbstractEventLoop, str], asyncio.Semaphore]
        self._gates = WeakValueDictionary()
        self._closed = False

    async def run(self, tenant: str, function: Callable[..., T], *arguments: Any) -> T:
        """The result of `function(*arguments)`. A cancelled caller leaves the queue; what runs is finished.

        Raises `ShuttingDownError` after `close`.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        gate = self._gates.setdefault((loop, tenant), asyncio.Semaphore(self._share))
        await gate.acquire()

        def leave(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(gate.release)

        try:
            future = self._pool.submit(function, *arguments)
        except RuntimeError:  # closed
            gate.release()
            raise ShuttingDownError("the server is shutting down") from None
        future.add_done_callback(leave)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if self._closed and not (task and task.cancelling()):
                raise ShuttingDownError("the server is shutting down") from None
            raise
        finally:
            del future  # an error's traceback holds this frame: the error and its job would be a cycle

    def close(self) -> None:
        """Take no more work: what waits gets `ShuttingDownError`, what runs ends by itself."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
