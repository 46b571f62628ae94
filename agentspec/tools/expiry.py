"""Drops results that nobody used in time, in one thread, which runs only while there are some."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from agentspec.tools.session import ToolSession


class ResultExpiry:
    """Asks sessions to drop what is too old. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: WeakSet[ToolSession] = WeakSet()
        self._timer: threading.Timer | None = None

    def watch(self, session: ToolSession, seconds: float) -> None:
        """Ask this session in so many seconds, or soon after."""
        with self._lock:
            self._sessions.add(session)
            if self._timer is None:
                self._start(seconds)

    def _start(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.name, self._timer.daemon = "agentspec-tool-expiry", True
        try:
            self._timer.start()
        except RuntimeError:  # no further thread can be started: the session's next turn drops them
            self._timer = None

    def _expire(self) -> None:
        with self._lock:
            sessions, self._sessions = list(self._sessions), WeakSet()
            self._timer = None
        for session in sessions:
            left = session.drop_old()
            if left is not None:
                self.watch(session, left)
