"""The token cache of a runtime, opened when something first needs it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from agentspec.cache.settings import CacheSettings

if TYPE_CHECKING:
    from agentspec.cache import SuffixCache


class LazyCache:
    """Opens the cache of the settings on first use, and closes what it opened. A `given` cache is its owner's to close.

    Thread-safe.
    """

    def __init__(self, settings: CacheSettings, given: SuffixCache | None) -> None:
        self._settings = settings
        self._given = given
        self._opening = threading.Lock()
        self.opened: SuffixCache | None = None

    def get(self) -> SuffixCache:
        """The open cache. Raises `CacheError` if it cannot be opened."""
        if self._given is not None:
            return self._given
        with self._opening:
            if self.opened is None:
                self.opened = self._settings.open()
            return self.opened

    def close(self) -> None:
        """Flush and close the cache that was opened here, if any. Blocks; idempotent."""
        if self.opened is not None:
            self.opened.close()
