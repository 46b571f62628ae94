"""The thread that looks after a cache: evictions, merges, what other processes did."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)


class MaintenanceThread:
    """Calls `work` every `seconds` in its own thread, and `urgent` soon after each `wake`.

    A failure is logged unless it repeats the last message.
    """

    def __init__(
        self, work: Callable[[], None], *, seconds: float, name: str, urgent: Callable[[], None] | None = None
    ) -> None:
        self._work = work
        self._urgent = urgent
        self._seconds = seconds
        self._closing = False
        self._woken = threading.Event()
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
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
        due = time.monotonic() + self._seconds
        while not self._closing:
            self._woken.wait(max(0.0, due - time.monotonic()))
            self._woken.clear()
            if self._closing:
                return
            if time.monotonic() >= due:
                self._try(self._work)
                due = time.monotonic() + self._seconds
            elif self._urgent:
                self._try(self._urgent)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
            self._failure = None
        except Exception as error:
            if str(error) != self._failure:
                _log.warning("looking after the cache failed: %s", error)
            self._failure = str(error)
