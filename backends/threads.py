"""Threads for blocking work that tenants share fairly: parsing large bodies, tokenizing long prompts."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from agentspec.errors import ShuttingDownError

T = TypeVar("T")
_Job = list[Any]  # a future and the call that it waits for; emptied when the call starts


class TenantThreads:
    """Runs functions in `threads` threads. No tenant takes the last free one unless there is only one.

    Tenants take turns, and each tenant's work starts in order of arrival. Safe to use from several event loops.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._free = threads
        self._share = max(1, threads - 1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._running: Counter[str] = Counter()
        self._closed = False

    async def run(self, tenant: str, function: Callable[..., T], *arguments: Any) -> T:
        """The result of `function(*arguments)`. A cancelled caller leaves the queue; what runs is finished."""
        future = self.submit(tenant, function, *arguments)
        try:
            return await asyncio.wrap_future(future)
        finally:
            del future  # for the same reason

    def submit(self, tenant: str, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Queue `function(*arguments)`; the future can be cancelled while it waits. Raises `ShuttingDownError`."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise ShuttingDownError("the server is shutting down")
            self._waiting.setdefault(tenant, deque()).append([future, partial(function, *arguments)])
        self._start()
        return future

    def close(self) -> None:
        """Take no more work: what waits gets `ShuttingDownError`, what runs ends by itself."""
        with self._lock:
            self._closed = True
            waiting = [job[0] for jobs in self._waiting.values() for job in jobs]
            self._waiting.clear()
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(ShuttingDownError("the server is shutting down"))
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        """Start what may run now: the next job of each tenant in turn that is below its share."""
        with self._lock:
            for tenant in list(self._waiting):
                if self._free and self._running[tenant] < self._share:
                    jobs = self._waiting[tenant]
                    self._pool.submit(self._work, tenant, jobs.popleft())
                    self._free -= 1
                    self._running[tenant] += 1
                    self._waiting.move_to_end(tenant)
                    if not jobs:
                        del self._waiting[tenant]

    def _work(self, tenant: str, job: _Job) -> None:
        # The traceback of an error holds this frame: without `clear` and `del`, an error and its job would be a cycle.
        future, call = job
        job.clear()
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        finally:
            del future, call
            with self._lock:
                self._free += 1
                self._running[tenant] -= 1
                if not self._running[tenant]:
                    del self._running[tenant]
            self._start()
