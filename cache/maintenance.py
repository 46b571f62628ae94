"""A background thread that looks after the cache while nobody asks it anything."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Keeper:
    """Calls `work` every `seconds` in its own thread. A failure is logged when it is not the last one's again."""

    def __init__(self, work: Callable[[], None], *, seconds: float, name: str) -> None:
        self._work = work
        self._seconds = seconds
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Return when the thread has ended. Idempotent."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        said = None
        while not self._closing.wait(self._seconds):
            try:
                self._work()
                said = None
            except Exception as error:
                if str(error) != said:
                    _log.warning("looking after the cache failed: %s", error)
                said = str(error)
