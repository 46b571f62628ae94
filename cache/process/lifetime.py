"""What becomes of open caches when the process ends normally, and in a process that is forked from it."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from typing import Protocol

_log = logging.getLogger(__name__)


class OpenCache(Protocol):
    """What is told of the end of its process, and of a fork."""

    def close(self) -> None: ...

    def leave_behind(self, reason: str) -> None:
        """Become unusable without waiting for anything: any lock may be held by a thread that was not copied."""


_open: weakref.WeakSet[OpenCache] = weakref.WeakSet()
_process = os.getpid()


def register(cache: OpenCache) -> None:
    """Close `cache` when this process ends normally, unless it is closed before."""
    _open.add(cache)


def unregister(cache: OpenCache) -> None:
    _open.discard(cache)


def _close_all() -> None:
    """Daemon threads may be drafting still: they find their cache closed, and then none stays inside native code."""
    for cache in list(_open):
        try:
            cache.close()
        except Exception as error:
            _log.warning("a cache could not be closed at exit: %s", error)


def _leave_all_behind() -> None:
    global _open, _process
    caches, _open, parent, _process = list(_open), weakref.WeakSet(), _process, os.getpid()
    reason = f"this cache was opened by process {parent}; a forked process cannot use it: open it again in this one"
    for cache in caches:
        cache.leave_behind(reason)


atexit.register(_close_all)
os.register_at_fork(after_in_child=_leave_all_behind)
