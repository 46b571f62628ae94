"""Groups: the open outputs of several requests for one prompt, from which the others of the group draft."""

from __future__ import annotations

import threading

from agentspec.cache.index import SuffixIndex
from agentspec.cache.tokens import Tokens

_OVERHEAD = 1024  # bytes of the Python objects around an index


class Group:
    """What the members of one group have put out so far. Thread-safe; it is given up with its last member."""

    __slots__ = ("_next", "index", "lock", "measured", "members")

    def __init__(self) -> None:
        self.index = SuffixIndex()
        self.members = 0  # open ones; counted by the partition
        self.measured = 0
        self._next = 0
        self.lock = threading.Lock()  # no text of a member that was taken out may follow

    def size(self) -> int:
        """Bytes that this group takes."""
        return self.index.memory_bytes() + _OVERHEAD

    def join(self, context: Tokens) -> Membership:
        """A further member, whose output begins after `context`."""
        with self.lock:
            self._next += 1
            return Membership(self, self._next, context)


class Membership:
    """One request's part of a group."""

    __slots__ = ("begun", "context", "group", "number", "withdrawn")

    def __init__(self, group: Group, number: int, context: Tokens) -> None:
        self.group = group
        self.number = number
        self.context = context
        self.begun = self.withdrawn = False

    def append(self, tokens: Tokens) -> None:
        """Let the other members draft `tokens`, unless this member's text was taken out."""
        with self.group.lock:
            if not self.withdrawn:
                begun, self.begun = self.begun, True
                self.group.index.append(self.number, tokens, self.context[:0] if begun else self.context)

    def withdraw(self) -> None:
        """Take out this member's text, and add no more of it. Idempotent."""
        with self.group.lock:
            self.withdrawn = True
            self.group.index.remove([self.number])
