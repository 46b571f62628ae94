"""A lock between processes: an exclusive `flock` on a file that is never deleted, and names the holder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

_PAUSE = 0.05  # seconds between two attempts


class PathLock:
    """An exclusive lock on the file `path`. The operating system releases it when the process ends, even if killed.

    A forked child has to `leave` its parent's locks. Not thread-safe.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def acquire(self, patience: float = 0.0) -> bool:
        """Try for `patience` seconds; whether the lock is held now. Raises `OSError` where files cannot be locked."""
        deadline = time.monotonic() + patience
        while not self._try():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE)
        return True

    def _try(self) -> bool:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file = file
            if self.is_held:
                with contextlib.suppress(OSError):  # a full disk keeps the name out, not the lock
                    os.ftruncate(file, 0)
                    os.pwrite(file, str(os.getpid()).encode(), 0)
                return True
        except BlockingIOError:
            pass
        except BaseException:
            os.close(file)
            self._file = None
            raise
        os.close(file)
        self._file = None
        return False

    def holder(self) -> str:
        """The id of the process that acquired the lock last, for messages."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return self._path.read_text() or "unknown"
        return "unknown"

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock, and the file is still the one that others would lock."""
        if self._file is None:
            return False
        try:
            there, mine = os.stat(self._path, follow_symlinks=False), os.fstat(self._file)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def release(self) -> None:
        """Idempotent."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # closing alone would leave it to a child that is being forked
            self.leave()

    def leave(self) -> None:
        """Stop using the lock without releasing it: its holder is the process that this one was forked from."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
