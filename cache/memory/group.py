"""Groups: the open outputs of several requests for one prompt, from which the others of the group draft."""

from __future__ import annotations

import threading

from agentspec.cache.index import SuffixIndex
from agentspec.cache.tokens import Tokens

_OVERHEAD = 1024  # bytes of the Python objects around an index


class Group:
    """What the members of one group have put out so far. Thread-safe; it is given up with its last member."""

    __slots__ = ("_lock", "_next", "index", "measured", "members")

    def __init__(self) -> None:
        self.index = SuffixIndex()
        self.members = 0  # open ones; counted by the partition
        self.measured = 0
        self._next = 0
        self._lock = threading.Lock()  # no text of a member that was taken out may follow

    def size(self) -> int:
        """Bytes that this group takes."""
        return self.index.memory_bytes() + _OVERHEAD

    def join(self, context: Tokens) -> Membership:
        """A further member, whose output begins after `context`."""
        with self._lock:
            self._next += 1
            return Membership(self, self._next, context)

    def append(self, member: Membership, tokens: Tokens) -> None:
        with self._lock:
            if not member.withdrawn:
                begun, member.begun = member.begun, True
                self.index.append(member.number, tokens, member.context[:0] if begun else member.context)

    def withdraw(self, member: Membership) -> None:
        """Take a member's text out. Idempotent."""
        with self._lock:
            member.withdrawn = True
            self.index.remove([member.number])


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
        self.group.append(self, tokens)

    def withdraw(self) -> None:
        """Take out this member's text, and add no more of it. Idempotent."""
        self.group.withdraw(self)
