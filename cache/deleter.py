"""Carries a forget through memory and store, so that nothing forgotten comes back by another way."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from agentspec.cache.deletion import Scope, Selection, select
from agentspec.cache.partition import Space
from agentspec.types import Namespace

if TYPE_CHECKING:
    from agentspec.cache.storage.sequence_store import Store

_RETENTION_SECONDS = 3600.0


class Forgetter:
    """Works on the spaces and the learned states of one cache, which its `lock` protects. Thread-safe.

    Where several locks are held they are taken in this order: `following`, while the store's news are taken in,
    followed or saved; `sharing`, from the question whether a session is forgotten until its output is shared; `lock`.
    """

    def __init__(
        self,
        store: Store | None,
        spaces: dict[Namespace, Space],
        learned: dict[str, bytes],
        lock: threading.RLock,
        retention: float | None,
    ) -> None:
        self.following = threading.RLock()
        self.sharing = threading.Lock()
        self.forgotten = 0  # sequences so far
        self._store = store
        self._spaces = spaces
        self._learned = learned
        self._lock = lock
        self._retention = retention
        self._expires_at = time.monotonic()

    @property
    def expires(self) -> bool:
        """Whether anything is forgotten by age."""
        return self._retention is not None

    def forget(self, selection: Selection) -> int:
        """Returns how many sequences went. Raises `CacheError` where the store cannot: then none did."""
        self._withdraw(selection.scope)
        if self._store:
            with self._store.segments.writing():
                count = self._store.forget(selection)
                self._store.segments.withdraw(selection.scope)
            self.settle()
            self._store.scrub(rewrite=True)
        else:
            count = self._forget_in_memory(selection)
        return self._counted(count)

    def expire(self) -> None:
        """Forget what is older than the retention, where it is this process's task."""
        self._expires_at = time.monotonic() + _RETENTION_SECONDS
        if self._retention is None or (self._store and self._store.mode == "follower"):
            return
        selection = select(older_than=self._retention)
        self._withdraw(selection.scope)
        if self._store:
            with self._store.segments.writing():
                self._counted(self._store.expire(selection))
                self._store.segments.withdraw(selection.scope)
            self.settle()
            self._store.scrub()
        else:
            self._counted(self._forget_in_memory(selection))

    def keep(self) -> None:
        """What is to be done now and then: follow other processes, finish what was in the way, expire."""
        if self._store:
            self.settle()
            self._store.scrub()
        if time.monotonic() >= self._expires_at:
            self.expire()

    def settle(self) -> None:
        """Follow what was forgotten in the store, by this process or another."""
        assert self._store is not None
        with self.following:
            for number, scope in self._store.unsettled():
                self._withdraw(scope)
                with self.sharing:  # what is covered is then waiting to be written, if it is not yet
                    covered = [(space, space.covered(scope)) for space in self._all_spaces()]
                self._store.settle(number, scope)
                for space, numbers in covered:
                    stored = self._store.numbers(space.namespace) if numbers else set()
                    self._drop(space, scope, [number for number in numbers if number not in stored])
                self._relearn(self._store.learned())

    def _withdraw(self, scope: Scope) -> None:
        """Drop the sessions in scope. Their requests in progress share nothing from here on."""
        with self.sharing, self._lock:
            for space in self._spaces.values():
                if scope.concerns(space.namespace):
                    space.sessions.withdraw(scope)

    def _forget_in_memory(self, selection: Selection) -> int:
        chosen = [(space, space.selected(selection)) for space in self._all_spaces()]
        for space, numbers in chosen:
            self._drop(space, selection.scope, numbers)
        self._relearn({})
        return sum(len(numbers) for _, numbers in chosen)

    def _drop(self, space: Space, scope: Scope, numbers: list[int]) -> None:
        """Drop sequences in scope, and what their namespace learned when nothing else is left in it."""
        if not scope.concerns(space.namespace):
            return
        with self._lock:
            space.forget(numbers)
            if not len(space.sessions) and not space.shared.sequence_count:
                self._spaces.pop(space.namespace, None)

    def _relearn(self, learned: dict[str, bytes]) -> None:
        """What namespaces that are not in memory learned is what the store says, which keeps no forgotten token."""
        with self._lock:
            self._learned.clear()
            self._learned.update(learned)

    def _counted(self, count: int) -> int:
        with self._lock:
            self.forgotten += count
        return count

    def _all_spaces(self) -> list[Space]:
        with self._lock:
            return list(self._spaces.values())
