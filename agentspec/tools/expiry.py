"""Drops results that nobody used in time, in one thread, which runs only while there are some."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from agentspec.tools.session import ToolSession

_LONGEST = 3600.0  # seconds that one timer waits


class ResultExpiry:
    """Asks sessions to drop what is too old. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: WeakSet[ToolSession] = WeakSet()
        self._timer: threading.Timer | None = None
        self._due = 0.0

    def watch(self, session: ToolSession, seconds: float) -> None:
        """Ask this session in so many seconds, or sooner, and again until it has nothing left."""
        due = time.monotonic() + min(seconds, _LONGEST)
        with self._lock:
            self._sessions.add(session)
            if self._timer is None or not self._timer.is_alive() or due < self._due:
                self._start(due)

    def close(self) -> None:
        """Ask nobody any more."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._sessions = None, WeakSet()

    def _start(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        timer = threading.Timer(max(0.0, due - time.monotonic()), self._expire)
        timer.name, timer.daemon = "agentspec-tool-expiry", True
        self._timer, self._due = timer, due
        try:
            timer.start()
        except RuntimeError:  # no further thread can be started: the session's next turn drops them
            self._timer = None

    def _expire(self) -> None:
        with self._lock:
            if self._timer is not threading.current_thread():  # a sooner one took its place
                return
            sessions, self._sessions = list(self._sessions), WeakSet()
            self._timer = None
        for session in sessions:
            left = session.drop_old()
            if left is not None:
                self.watch(session, left)
