"""A dictionary that forgets what was used least recently."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class RecentlyUsed(Generic[K, V]):
    """At most `most` keys. Reading or writing a key makes it the newest; the oldest goes first. Each costs O(1).

    `forgotten` is called with each value that goes for want of room.
    """

    def __init__(self, most: int, forgotten: Callable[[V], object] | None = None) -> None:
        if most < 1:
            raise ValueError(f"most must be at least 1, not {most}")
        self._most = most
        self._forgotten = forgotten
        self._values: OrderedDict[K, V] = OrderedDict()  # the oldest first

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def get(self, key: K) -> V | None:
        """The value of `key`, which becomes the newest; None if it is not known."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key]

    def put(self, key: K, value: V) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._most:
            _, oldest = self._values.popitem(last=False)
            if self._forgotten is not None:
                self._forgotten(oldest)

    def oldest(self) -> tuple[K, V] | None:
        """What was used least recently, which it stays; None if there is nothing."""
        return next(iter(self._values.items()), None)

    def pop(self, key: K) -> V | None:
        """Take `key` out, and return its value; None if it is not known."""
        return self._values.pop(key, None)
