"""A background thread that commits what it is handed, as much as has gathered at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from agentspec.errors import CacheError

Job = TypeVar("Job")

_log = logging.getLogger(__name__)


class BatchWriter(Generic[Job]):
    """Calls `commit(jobs)` in its own thread. After a commit fails it warns once and drops everything from then on."""

    def __init__(self, commit: Callable[[list[Job]], None], *, name: str) -> None:
        self.error: str | None = None
        self._commit = commit
        self._changed = threading.Condition()
        self._jobs: list[Job] = []
        self._put = 0
        self._done = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Hand over a job; returns at once. Ignored after a failure."""
        with self._changed:
            if self.error is None and not self._closing:
                self._jobs.append(job)
                self._put += 1
                self._changed.notify_all()

    def flush(self) -> None:
        """Return when all jobs put so far are committed. Raises `CacheError` when they cannot be."""
        with self._changed:
            goal = self._put
            self._changed.wait_for(lambda: self._done >= goal or self.error is not None)
            if self.error is not None:
                raise CacheError(f"the cache is not written any more: {self.error}")

    def stop(self, error: str) -> None:
        """Give up writing for the reason given."""
        with self._changed:
            if self.error is None:
                _log.warning("the cache goes on in memory only, nothing more is written: %s", error)
            self.error = error
            self._jobs.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Commit what is left and end the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while jobs := self._take():
            try:
                self._commit(jobs)
            except Exception as error:
                self.stop(str(error))
            with self._changed:
                self._done += len(jobs)
                self._changed.notify_all()

    def _take(self) -> list[Job]:
        """All waiting jobs; empty when closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closing)
            jobs, self._jobs = self._jobs, []
            return jobs
