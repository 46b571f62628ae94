"""A background thread that commits the jobs gathered so far in batches, and tries again after a transient failure."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from agentspec.errors import CacheError

Job = TypeVar("Job")

_FIRST_DELAY, _LAST_DELAY = 0.25, 2.0  # seconds until a failed commit is tried again

_PLENTY = 1 << 20  # total size of jobs that need not wait for more,
MOST_JOBS = 256  # and how many: a commit takes no more of either, which is well below 50 ms of work

_log = logging.getLogger(__name__)


class BatchWriter(Generic[Job]):
    """Calls `commit(jobs)` in its own thread, with the jobs that wait; it returns how many it left out for good.

    Where more wait than one commit takes, the thread rests as long as the commit took, so that other processes which
    want to write need not wait for all of them. A job waits up to `linger` seconds for others to join it, unless
    someone waits for it to be committed.

    After a failure that `is_transient` accepts, the jobs wait and are tried again; meanwhile the oldest are dropped
    when the waiting jobs exceed `room` by `size`. Any other failure ends writing for good. Each outage is logged once.
    """

    def __init__(
        self,
        commit: Callable[[list[Job]], int],
        *,
        name: str,
        is_transient: Callable[[Exception], bool],
        describe: Callable[[Exception], str] = str,
        size: Callable[[Job], int] = lambda _: 1,
        room: int,
        linger: float = 0.0,
    ) -> None:
        self.error: str | None = None  # why jobs cannot be written now
        self.dropped = 0  # jobs that will never be written
        self._commit = commit
        self._is_transient = is_transient
        self._describe = describe
        self._size = size
        self._room = room
        self._linger = linger
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._taken: list[Job] = []  # that are being committed
        self._waiting = 0  # total size of the waiting jobs
        self._put = self._done = 0  # jobs so far
        self._reported = 0  # dropped jobs that `flush` has reported
        self._revising = 0  # calls of `revise` that wait
        self._flushing = 0  # calls of `flush` that wait
        self._busy = self._ended = self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a job; returns at once. A job put after `close` is ignored."""
        with self._changed:
            if self._closing:
                return
            self._put += 1
            self._jobs.append(job)
            self._waiting += self._size(job)
            self._bound()
            if len(self._jobs) == 1 or self._is_urgent():  # else the thread knows, and waits for more
                self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all jobs put so far are committed. Raises `CacheError` if commits fail or jobs were dropped."""
        with self._changed:
            goal = self._put
            self._flushing += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done >= goal or self.error is not None)
            self._flushing -= 1
            fresh, self._reported = self.dropped - self._reported, self.dropped
            if self.error is not None:
                again = "" if self._ended else "; it is tried again"
                raise CacheError(f"the cache cannot be written now: {self.error}{again}")
            if fresh:
                raise CacheError(
                    f"{fresh} writes were dropped: the database refused them, there was no room to wait for it, or"
                    " another process searched for text to forget before they were written"
                )

    def waiting(self) -> list[Job]:
        with self._changed:
            return [*self._taken, *self._jobs]

    def revise(self, change: Callable[[Iterable[Job]], Iterable[Job]]) -> None:
        """Replace the waiting jobs by `change(jobs)`, while no job is being committed. It may add to `dropped`."""
        with self._changed:
            self._revising += 1  # no further commit begins meanwhile, however many jobs are put
            self._changed.wait_for(lambda: not self._busy)
            self._revising -= 1
            before = len(self._jobs)
            self._jobs = deque(change(self._jobs))
            self._waiting = sum(map(self._size, self._jobs))
            self._done += before - len(self._jobs)
            if not self._jobs and not self._ended:
                self.error = None  # no commit is left that could succeed and say so
            self._changed.notify_all()

    def close(self) -> None:
        """Try once to commit the waiting jobs, then end the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        delay = _FIRST_DELAY
        while jobs := self._take():
            last, begun = self._closing, time.monotonic()
            try:
                left_out = self._commit(jobs)
            except Exception as error:
                self._failed(jobs, error, last)
                self._rest(delay)
                delay = min(2 * delay, _LAST_DELAY)
            else:
                self._succeeded(jobs, left_out)
                delay = _FIRST_DELAY
                if self._jobs:
                    self._rest(time.monotonic() - begun)

    def _take(self) -> list[Job]:
        """The oldest waiting jobs, as many as one commit takes; empty when closing."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                self._changed.wait_for(self._is_urgent, self._linger)
                self._changed.wait_for(lambda: not self._revising)
                if self._jobs or self._closing:  # `revise` may have left none
                    break
            jobs = self._taken = self._oldest()
            self._busy = bool(jobs)  # without any the thread ends
            return jobs

    def _oldest(self) -> list[Job]:
        jobs: list[Job] = []
        size = 0
        while self._jobs and len(jobs) < MOST_JOBS and size < _PLENTY:
            jobs.append(self._jobs.popleft())
            size += self._size(jobs[-1])
        self._waiting -= size
        return jobs

    def _is_urgent(self) -> bool:
        """Whether the waiting jobs are to be committed at once, without waiting for more."""
        full = len(self._jobs) >= MOST_JOBS or self._waiting >= min(_PLENTY, self._room)
        return full or bool(self._flushing or self._revising or self._closing)

    def _succeeded(self, jobs: list[Job], left_out: int) -> None:
        with self._changed:
            self.dropped += left_out
            if self.error is not None:
                _log.warning("the cache is written again; %d writes were dropped", self.dropped)
            self.error = None
            self._done += len(jobs)
            self._taken, self._busy = [], False
            self._changed.notify_all()

    def _failed(self, jobs: list[Job], error: Exception, last: bool) -> None:
        message = self._describe(error)
        with self._changed:
            transient = self._is_transient(error)
            if self.error is None:
                until = "until it can be" if transient else "any more"
                _log.warning("the cache goes on in memory only, nothing is written %s: %s", until, message)
            self.error = message
            self._ended = last or not transient
            self._jobs.extendleft(reversed(jobs))
            self._waiting += sum(map(self._size, jobs))
            self._taken, self._busy = [], False
            self._bound()
            if last:
                _log.warning("at the end %d writes were left undone: %s", self.dropped, message)
            self._changed.notify_all()

    def _bound(self) -> None:
        """During a failure drop the oldest jobs beyond `room`; once writing has ended, drop all."""
        while self.error is not None and self._jobs and (self._ended or self._waiting > self._room):
            self._waiting -= self._size(self._jobs.popleft())
            self._done += 1
            self.dropped += 1

    def _rest(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing, seconds)
