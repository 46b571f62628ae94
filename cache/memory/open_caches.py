"""The caches that this process has open: they are closed at its exit, and left behind in a forked child."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentspec.cache.suffix_cache import SuffixCache

_log = logging.getLogger(__name__)
_open: weakref.WeakSet[SuffixCache] = weakref.WeakSet()
_process = os.getpid()


def add(cache: SuffixCache) -> None:
    _open.add(cache)


def discard(cache: SuffixCache) -> None:
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
