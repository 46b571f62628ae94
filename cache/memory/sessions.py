"""Sessions: each has an index over its conversation's latest transcript, which gets only the new tokens."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from agentspec.cache.deletion import Scope
from agentspec.cache.index import SuffixIndex
from agentspec.cache.memory.group import Membership
from agentspec.cache.tokens import Tokens

TRANSCRIPT = 0
"""Number of the only sequence in a session's index."""

_OVERHEAD = 1024  # bytes of the Python objects around an index
_SEARCHED = 512  # lengths of prompts, and sessions, looked at for the session that a prompt continues
_MARK = 8  # tokens at the end of what a prompt must share with the last that tell most sessions apart

Mark = tuple[int, bytes]
"""Tokens of the last prompt that a continuation must share, and the last of these tokens."""


class Session:
    """One conversation. Not thread-safe: the request that acquired it is its only user.

    `label` is the name that the request gave; where the session of that name is busy, a further, nameless session has
    the same label. Once `forgotten` is set, which may happen during a request, that request must not draft from the
    session nor share its output.
    """

    __slots__ = ("busy", "forgotten", "index", "label", "mark", "measured", "membership", "name", "used_at")

    def __init__(self, name: str | None, label: str | None = None) -> None:
        self.name = name
        self.label = name if label is None else label
        self.used_at = time.time()
        self.forgotten = False
        self.index = SuffixIndex()
        self.busy = True
        self.measured = 0
        self.membership: Membership | None = None  # of the request that holds this session
        self.mark: Mark = 0, b""

    def begin(self, prompt: Tokens, limit: int) -> None:
        """Make `prompt` the transcript: the tokens shared with the last transcript stay, others are cut off or added.

        Of a prompt of more than `limit` tokens only the last `limit` are kept.
        """
        kept = prompt[-limit:]
        known = self.index.common_prefix(TRANSCRIPT, kept) if self.index.sequence_count else 0
        if not self.index.sequence_count or known < self.index.length(TRANSCRIPT) // 2:
            self.index, known = SuffixIndex(), 0
        elif known < self.index.length(TRANSCRIPT):
            self.index.truncate(TRANSCRIPT, known)
        self.index.append(TRANSCRIPT, kept[known:])
        needed = len(kept) - min(16, len(kept) // 4)
        self.mark = needed, kept[max(0, needed - _MARK) : needed].tobytes()

    def size(self) -> int:
        """Bytes that this session takes."""
        return self.index.memory_bytes() + _OVERHEAD

    def continued_by(self, prompt: Tokens) -> int:
        """Number of tokens shared with `prompt` if it continues this session's last prompt, else 0.

        The last few tokens of the last prompt may differ: chat templates end a prompt otherwise than they continue it.
        """
        shared = self.index.common_prefix(TRANSCRIPT, prompt)
        return shared if shared >= self.mark[0] else 0


class Sessions:
    """The sessions of one namespace, least recently used first. The caller holds the namespace's lock."""

    __slots__ = ("_by_name", "_idle", "_sessions", "busy", "memory_bytes")

    def __init__(self) -> None:
        self._sessions: OrderedDict[int, Session] = OrderedDict()
        self._by_name: dict[str, Session] = {}
        self._idle: OrderedDict[int, dict[bytes, dict[int, Session]]] = OrderedDict()  # that no request holds, by mark
        self.memory_bytes = 0
        self.busy = 0  # sessions that requests hold

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def acquire(self, name: str | None, prompt: Tokens) -> Session:
        """The session of that name, or without a name the session that `prompt` continues; a new session if none fits.

        A session that another request holds is not shared: the caller gets a new, nameless session.
        """
        self.busy += 1
        found = self._by_name.get(name) if name is not None else self._continued_by(prompt)
        if found is not None and not found.busy:
            self._take(found)
            found.busy = True
            found.used_at = time.time()
            self._sessions.move_to_end(id(found))
            return found
        session = Session(name if found is None else None, name)
        self._sessions[id(session)] = session
        if session.name is not None:
            self._by_name[session.name] = session
        return session

    def _continued_by(self, prompt: Tokens) -> Session | None:
        if len(prompt) == 0:
            return None
        data = prompt.data.cast("B")
        marked: list[Session] = []
        for needed in islice(reversed(self._idle), _SEARCHED):
            if needed <= len(prompt):
                mark = bytes(data[4 * max(0, needed - _MARK) : 4 * needed])
                marked += islice(reversed(self._idle[needed].get(mark, {}).values()), _SEARCHED)
        scored = [(one.continued_by(prompt), one.used_at, one) for one in marked]
        shared, _, session = max(scored, key=lambda each: each[:2], default=(0, 0.0, None))
        return session if shared else None

    def _file(self, session: Session) -> None:
        """Let a session be found that no request holds."""
        needed, end = session.mark
        self._idle.setdefault(needed, {}).setdefault(end, {})[id(session)] = session
        self._idle.move_to_end(needed)

    def _take(self, session: Session) -> None:
        """Let nobody find a session. Does nothing where nobody would."""
        needed, end = session.mark
        marks = self._idle.get(needed, {})
        alike = marks.get(end, {})
        if alike.pop(id(session), None) is not None and not alike:
            del marks[end]
            if not marks:
                del self._idle[needed]

    def measure(self, session: Session) -> None:
        """Account for the session's present size."""
        if id(session) in self._sessions:
            size = session.size()
            self.memory_bytes += size - session.measured
            session.measured = size

    def release(self, session: Session) -> None:
        self._no_longer_busy(session)
        session.used_at = time.time()
        self.measure(session)
        if id(session) in self._sessions and session.index.sequence_count:  # else it was never begun
            self._file(session)

    def _no_longer_busy(self, session: Session) -> None:
        if session.busy and id(session) in self._sessions:
            self.busy -= 1
        session.busy = False

    def evict(self) -> bool:
        """Evict the least recently used idle session; returns false if there is none."""
        session = next((session for session in self if not session.busy), None)
        if session is None:
            return False
        self.forget(session)
        return True

    def forget(self, session: Session) -> None:
        """Delete a session with its transcript. Does nothing if it is deleted already."""
        self._no_longer_busy(session)
        self._take(session)
        if self._sessions.pop(id(session), None) is None:
            return
        if session.name is not None:
            del self._by_name[session.name]
        self.memory_bytes -= session.measured

    def invalidate(self, scope: Scope) -> None:
        """Delete the sessions in scope, also those that requests hold; a held session counts as used now.

        Sessions are not searched for patterns: to begin anew from the next prompt costs little.
        """
        for session in list(self):
            if scope.covers(session.label, time.time() if session.busy else session.used_at):
                session.forgotten = True
                if session.membership:
                    session.membership.withdraw()
                self.forget(session)
