"""Which process is a folder's writer. Held by the operating system, so that a killed process never blocks the next."""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock, Timeout

from agentspec.errors import CacheLockedError


class WriterLock:
    """Taken on construction. Raises `CacheLockedError`, naming the holder's process id, where another has it."""

    def __init__(self, folder: Path) -> None:
        self._pid_file = folder / "writer.pid"
        self._lock = FileLock(folder / "writer.lock", timeout=0, mode=0o600, thread_local=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise CacheLockedError(f"{folder} is written by process {self._holder()}; open it as a follower") from None
        self._pid_file.touch(mode=0o600)
        self._pid_file.write_text(str(os.getpid()))

    def _holder(self) -> str:
        try:
            return self._pid_file.read_text() or "unknown"
        except OSError:
            return "unknown"

    def release(self) -> None:
        """Idempotent."""
        self._lock.release()
