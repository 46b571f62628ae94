"""The life of an open cache between its requests: the thread that looks after it, and the process's exit and forks."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentspec.cache.suffix_cache import SuffixCache

_log = logging.getLogger(__name__)

_MAINTENANCE_SECONDS = 0.5  # how often a process, idle or not, applies what other processes added and deleted


class MaintenanceThread:
    """Calls `work` every half second in its own thread, and `urgent` soon after each `wake`.

    A failure is logged unless it repeats the last message.
    """

    def __init__(self, work: Callable[[], None], urgent: Callable[[], None]) -> None:
        self._work = work
        self._urgent = urgent
        self._closing = False
        self._woken = threading.Event()
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="agentspec-cache-maintenance", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Let the thread call `urgent`; returns at once."""
        self._woken.set()

    def close(self) -> None:
        """End the thread and wait for it. Idempotent."""
        self._closing = True
        self._woken.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        due = time.monotonic() + _MAINTENANCE_SECONDS
        while not self._closing:
            self._woken.wait(max(0.0, due - time.monotonic()))
            self._woken.clear()
            if self._closing:
                return
            if time.monotonic() >= due:
                self._try(self._work)
                due = time.monotonic() + _MAINTENANCE_SECONDS
            else:
                self._try(self._urgent)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
            self._failure = None
        except Exception as error:
            if str(error) != self._failure:
                _log.warning("looking after the cache failed: %s", error)
            self._failure = str(error)


# The caches that this process has open: they are closed at its exit, and left behind in a forked child.
OPEN: weakref.WeakSet[SuffixCache] = weakref.WeakSet()


def _close_all() -> None:
    """Daemon threads may be drafting still: they find their cache closed, and then none stays inside native code."""
    for cache in list(OPEN):
        try:
            cache.close()
        except Exception as error:
            _log.warning("a cache could not be closed at exit: %s", error)


def _leave_all_behind() -> None:
    """In a forked process every use of the parent's caches raises, and neither uses nor closes their files."""
    opener = f"this cache was opened by process {os.getppid()}"
    for cache in list(OPEN):
        cache.leave_behind(f"{opener}; a forked process cannot use it: open it again in this one")
    OPEN.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_leave_all_behind)
