"""Running totals: sizes by name with their sum and the largest of them, none of which costs a look at every name."""

from __future__ import annotations

from collections.abc import Collection, ItemsView
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

K = TypeVar("K")

_order = count()  # keys are never compared


class Totals(Generic[K]):
    """Sizes by key. A change is O(1), `largest` O(log n) for each key that changed since the last call.

    Not thread-safe: the caller has a lock.
    """

    __slots__ = ("_changed", "_heap", "_sizes", "total")

    def __init__(self) -> None:
        self.total = 0
        self._sizes: dict[K, int] = {}
        self._changed: set[K] | None = None  # keys that are not in the heap with their present size
        self._heap: list[tuple[int, int, K]] = []  # (-size, order, key); some of sizes that keys had before

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, key: K) -> int:
        return self._sizes.get(key, 0)

    def items(self) -> ItemsView[K, int]:
        return self._sizes.items()

    def add(self, key: K, change: int) -> None:
        """Change a size; a key without a size has none of 0 bytes."""
        if not change:
            return
        size = self._sizes.get(key, 0) + change
        if size:
            self._sizes[key] = size
        else:
            del self._sizes[key]
        self.total += change
        if self._changed is not None:
            (self._changed.add if size else self._changed.discard)(key)

    def largest(self, passed: Collection[K] = ()) -> K | None:
        """The key of the greatest size, those in `passed` left out; None if there is none."""
        self._refresh()
        set_aside = []
        found = None
        while self._heap and found is None:
            size, _, key = entry = self._heap[0]
            if -size == self._sizes.get(key) and key not in passed:
                found = key
            else:
                heappop(self._heap)
                if -size == self._sizes.get(key):
                    set_aside.append(entry)
        for entry in set_aside:
            heappush(self._heap, entry)
        return found

    def _refresh(self) -> None:
        """Bring the heap up to date; from nothing where most of it is out of date."""
        if self._changed is None or len(self._heap) + len(self._changed) > 64 + 4 * len(self._sizes):
            self._heap = [(-size, next(_order), key) for key, size in self._sizes.items()]
            heapify(self._heap)
        else:
            for key in self._changed:
                heappush(self._heap, (-self._sizes[key], next(_order), key))
        self._changed = set()
