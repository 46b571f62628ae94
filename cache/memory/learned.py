"""What namespaces learned that are not in memory: few bytes each, and no more than a bound for all."""

from __future__ import annotations

from collections import OrderedDict

from agentspec.types import Namespace


class KeptLearned:
    """Learned states of namespaces that left memory. Over `room` bytes the oldest are dropped.

    Not thread-safe: the caller has a lock.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._states: OrderedDict[Namespace, bytes] = OrderedDict()
        self._bytes = 0
        self._unsaved: set[Namespace] = set()

    def put(self, namespace: Namespace, learned: bytes) -> None:
        self.take(namespace)
        self._states[namespace] = learned
        self._unsaved.add(namespace)
        self._bytes += len(learned)
        while self._bytes > self._room and self._states:
            self.take(next(iter(self._states)))

    def take(self, namespace: Namespace) -> bytes | None:
        """The state of a namespace that comes into memory again; None if it is not known."""
        state = self._states.pop(namespace, None)
        self._unsaved.discard(namespace)
        self._bytes -= len(state or b"")
        return state

    def take_unsaved(self) -> dict[str, bytes]:
        """By key the states that were put since the last call."""
        states = {one.key: self._states[one] for one in self._unsaved if one in self._states}
        self._unsaved.clear()
        return states

    def clear(self) -> None:
        self._states.clear()
        self._unsaved.clear()
        self._bytes = 0
