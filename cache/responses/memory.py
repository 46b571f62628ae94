"""Stored answers of a process without a database. They are gone at its exit."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, replace

from agentspec.cache.deletion import Scope, Selection
from agentspec.cache.responses.stored import (
    ROW,
    Refuses,
    ResponseLimits,
    StoredResponse,
    admitted,
    covers,
    unpacked,
)

_LONGEST = 86400.0  # seconds that a request may have lasted whose answer is about to be stored


@dataclass(frozen=True, slots=True)
class _Entry:
    """An answer with its content packed, so that the bounds count what is held."""

    stored: StoredResponse
    body: bytes

    @property
    def size(self) -> int:
        return ROW + len(self.body)


class MemoryResponses:
    """A `ResponseStore` in memory."""

    def __init__(self, limits: ResponseLimits, refuses: Refuses | None = None) -> None:
        self._limits = limits
        self._refuses = refuses
        self._forgotten: list[tuple[float, Scope]] = []  # and when
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}  # oldest first
        self._bytes: Counter[str] = Counter()

    def put(self, stored: StoredResponse) -> bool:
        body = admitted(stored, self._limits, self._refuses)
        if body is None:
            return False
        entry = _Entry(replace(stored, response={}, items=(), begun=None), body)
        with self._lock:
            present = self._entries.get(stored.id)
            if present is not None and present.stored.tenant != stored.tenant:
                return False
            if stored.is_forgotten(self._forgotten):
                return False
            self._remove(stored.id)
            self._entries[stored.id] = entry
            self._bytes[stored.tenant] += entry.size
            self._expire()
            self._keep_bounds(stored.tenant)
        return True

    def get(self, tenant: str, id: str) -> StoredResponse | None:
        with self._lock:
            self._expire()
            entry = self._entries.get(id)
        if entry is None or entry.stored.tenant != tenant or entry.stored.created_at < self._limits.oldest:
            return None
        return replace(entry.stored, **unpacked(entry.body, id))

    def delete(self, tenant: str, id: str) -> bool:
        with self._lock:
            self._expire()
            entry = self._entries.get(id)
            if entry is None or entry.stored.tenant != tenant:
                return False
            self._remove(id)
            return True

    def forget(self, selection: Selection) -> int:
        now = time.time()
        with self._lock:
            self._forgotten = [one for one in self._forgotten if one[0] > now - _LONGEST]
            self._forgotten.append((now, selection.scope))
            covered = [id for id, entry in self._entries.items() if _covers(selection, entry)]
            for id in covered:
                self._remove(id)
            return len(covered)

    def maintain(self) -> None:
        with self._lock:
            self._expire()

    def total_bytes(self) -> int:
        """The bytes of all answers."""
        with self._lock:
            return self._bytes.total()

    def _remove(self, id: str) -> None:
        entry = self._entries.pop(id, None)
        if entry is None:
            return
        tenant = entry.stored.tenant
        self._bytes[tenant] -= entry.size
        if not self._bytes[tenant]:
            del self._bytes[tenant]

    def _expire(self) -> None:
        before = self._limits.oldest
        while self._entries:
            oldest = next(iter(self._entries.values())).stored
            if oldest.created_at >= before:
                return
            self._remove(oldest.id)

    def _keep_bounds(self, tenant: str) -> None:
        if self._limits.tenant is not None:
            while self._bytes[tenant] > self._limits.tenant:
                self._remove_oldest(tenant)
        while self._bytes.total() > self._limits.total:
            self._remove_oldest(self._bytes.most_common(1)[0][0])

    def _remove_oldest(self, tenant: str) -> None:
        self._remove(next(id for id, entry in self._entries.items() if entry.stored.tenant == tenant))


def _covers(selection: Selection, entry: _Entry) -> bool:
    stored = entry.stored
    return covers(selection, stored.tenant, stored.session, stored.created_at, entry.body)
