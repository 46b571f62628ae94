"""How long a cache lives: opened within its limits, looked after by a thread, closed at exit, left behind in a fork."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agentspec.errors import CacheDamagedError, CacheError, CacheFormatError, ConfigurationError

if TYPE_CHECKING:
    from agentspec.cache.suffix_cache import SuffixCache

Mode = Literal["auto", "writer", "follower"]

_log = logging.getLogger(__name__)

_MAINTENANCE_SECONDS = 0.5  # how often a process, idle or not, applies what other processes added and deleted


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Bytes in memory and on disk, of all tenants and of each, and of stored answers. None: no limit.

    Raises `ConfigurationError`, which names the limit, unless each is 1 or more.
    """

    memory_bytes: int
    tenant_memory_bytes: int | None = None
    disk_bytes: int | None = None
    tenant_disk_bytes: int | None = None
    responses_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for field in fields(self):
            limit = getattr(self, field.name)
            if limit is None and field.default is None:
                continue
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
                message = f"{field.name} must be a positive number of bytes, not {limit!r}"
                raise ConfigurationError(message, param=field.name)


def opened_at(path: str | Path, mode: Mode, limits: CacheLimits, made: Callable[..., SuffixCache]) -> SuffixCache:
    """A cache that persists at `path`, or one in memory as `SuffixCache.open` says; `made` gets the store."""
    from agentspec.cache.storage.sequence_store import SequenceStore

    def opened() -> SuffixCache:
        sizes = {"disk_bytes": limits.disk_bytes, "tenant_disk_bytes": limits.tenant_disk_bytes}
        return made(SequenceStore.open(path, **sizes, mode=mode))

    try:
        try:
            return opened()
        except CacheDamagedError:  # a writer replaces the database, now that the damage is known
            return opened()
    except CacheError as error:
        if mode != "auto" or isinstance(error, CacheFormatError):
            raise
        _log.warning("the cache is in memory only, and gone at exit: %s", error)
        return made(None, error.message)


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
    caches = list(OPEN)
    OPEN.clear()
    reason = (
        f"this cache was opened by process {os.getppid()}; a forked process cannot use it: open it again in this one"
    )
    for cache in caches:
        cache.leave_behind(reason)


atexit.register(_close_all)
os.register_at_fork(after_in_child=_leave_all_behind)
