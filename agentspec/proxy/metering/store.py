"""Opens the store of what keys used."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from agentspec.cache.usage import KeepsUsage
from agentspec.runtime import Runtime

if TYPE_CHECKING:
    from agentspec.cache.usage.alone import UsageAlone


class UsageSource:
    """The store beside the cache of `runtime`, opened when it is first called. Thread-safe.

    A gateway without local models uses the database alone: its cache would read all that a fleet wrote into memory.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._opening = threading.Lock()
        self._alone: UsageAlone | None = None

    def __call__(self) -> KeepsUsage:
        """Raises `CacheError` if the database cannot be used now."""
        settings = self._runtime.settings
        location = settings.cache.location()
        if location is None or any(backend.local for backend in settings.backends.values()):
            return self._runtime.cache.usage
        from agentspec.cache.usage.alone import UsageAlone

        with self._opening:
            if self._alone is None:
                self._alone = UsageAlone.open(location, settings.cache.usage_days)
            return self._alone

    def close(self) -> None:
        """Close what this opened."""
        with self._opening:
            if self._alone is not None:
                self._alone.close()
                self._alone = None
