"""One namespace's part of the cache: its cached past outputs, its drafter's learned state, and its sessions.

A session has an index over its conversation's latest transcript, which gets only the new tokens.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from agentspec.cache.index import IndexDrafter, SuffixIndex
from agentspec.cache.tokens import SequenceMeta, SequenceRecord, Tokens
from agentspec.errors import InvalidRequestError
from agentspec.types import Namespace

_OVERHEAD = 2048  # bytes of the Python objects of an empty namespace
_META_BYTES = 256  # bytes of a SequenceMeta with its place in the table
_LEAST_SHARE = 1 / 16  # of the outputs, to evict at once: an index gives memory back once so much of a run is removed
_SHAPED = 8_192  # tokens, of the newest outputs, of which the shape is kept: with more no drafts were better

TRANSCRIPT = 0
"""Number of the only sequence in a session's index."""

_SESSION_BYTES = 1024  # of the Python objects around a session's index
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

    __slots__ = ("busy", "forgotten", "index", "label", "mark", "measured", "name", "used_at")

    def __init__(self, name: str | None, label: str | None = None) -> None:
        self.name = name
        self.label = name if label is None else label
        self.used_at = time.time()
        self.forgotten = False
        self.index = SuffixIndex()
        self.busy = True
        self.measured = 0
        self.mark: Mark = 0, b""

    def begin(self, prompt: Tokens, limit: int) -> None:
        """Make `prompt` the transcript: the tokens shared with the last transcript stay, others are cut off or added.

        Of a prompt of more than `limit` tokens only the last `limit` are kept.
        """
        kept = prompt[-limit:]
        held = self.index.length(TRANSCRIPT) if self.index.sequence_count else 0
        known = self.index.common_prefix(TRANSCRIPT, kept) if held else 0
        if known < held // 2:
            self.index, known = SuffixIndex(), 0
        elif known < held:
            self.index.truncate(TRANSCRIPT, known)
        self.index.append(TRANSCRIPT, kept[known:])
        needed = len(kept) - min(16, len(kept) // 4)
        self.mark = needed, kept[max(0, needed - _MARK) : needed].tobytes()

    def size(self) -> int:
        return self.index.memory_bytes() + _SESSION_BYTES

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
        """Let a session not be found. Does nothing where it would not be."""
        needed, end = session.mark
        marks = self._idle.get(needed, {})
        alike = marks.get(end, {})
        if alike.pop(id(session), None) is not None and not alike:
            del marks[end]
            if not marks:
                del self._idle[needed]

    def measure(self, session: Session) -> None:
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


class Partition:
    """One namespace's outputs, drafter and sessions. Namespaces share neither tokens nor learned states.

    `lock` guards all but drafting and `merge`, which no thread waits for; who takes it from outside looks whether the
    partition is `retired`: then it has left the cache, and a request that comes later gets another. What a namespace
    has not changed takes no memory.
    """

    def __init__(self, namespace: Namespace, *, loaded: bool = True) -> None:
        self.namespace = namespace
        self.lock = threading.RLock()
        self.merging = threading.Lock()
        self.shared = SuffixIndex(deferred=True)
        self.shapes = SuffixIndex(shapes=True)  # of its newest outputs
        self.drafter = IndexDrafter()
        self.sessions = Sessions()
        self.load_at = 0.0  # when loading is tried again
        self.loaded = loaded  # whether it has what the store has
        self.retired = False
        self.added = 0  # tokens added since this object was made
        self.learned = b""  # what the store has of its drafter, as far as this process knows
        self.saved = 0  # of them, those of them in the segment on disk
        self.measured = 0  # bytes that the table has booked for it,
        self.owed = 0  # and for its text that is gone but not merged away
        self.used_at = time.monotonic()
        self.counts: Counter[str] = Counter()  # of its requests' steps; the pool's lock guards it
        self._meta: dict[int, SequenceMeta] = {}

    @property
    def is_empty(self) -> bool:
        return not len(self.sessions) and not self.shared.sequence_count

    def idle_since(self, seconds: float) -> bool:
        """Whether no request is open, and none was begun for so many seconds."""
        return not self.sessions.busy and time.monotonic() - self.used_at >= seconds

    def memory_bytes(self) -> int:
        own = self.drafter.memory_bytes() + _OVERHEAD
        return self._past_bytes() + self.sessions.memory_bytes + own

    def _past_bytes(self) -> int:
        return self.shared.memory_bytes() + self.shapes.memory_bytes() + _META_BYTES * len(self._meta)

    def reclaimable_bytes(self) -> int:
        """Bytes of text that is gone, among `memory_bytes`: merging gives them back."""
        return self.shared.reclaimable_bytes()

    def merge(self, enough: Callable[[], bool]) -> None:
        """Do the work that adding and deleting have put off, a piece at a time, until `enough()`. It needs no lock."""
        while not enough() and self.merge_piece():
            pass

    def merge_piece(self, *, wait: bool = True) -> bool:
        """Do a piece of it; false where there is none, or readers hold it up. Threads take turns; without `wait` false
        where it is another's turn.
        """
        if not self.merging.acquire(blocking=wait):
            return False
        try:
            return self.shared.merge_step()
        finally:
            self.merging.release()

    def add(self, record: SequenceRecord) -> None:
        with self.lock:
            while not self._append(record):
                self._evict_past(_LEAST_SHARE)
                self.merge(lambda: False)
            self._meta[record.sequence] = record.meta
            self.added += len(record.tokens)

    def _append(self, record: SequenceRecord) -> bool:
        """Add to the index; false where it has no positions left but would have them without older outputs."""
        try:
            self.shared.append(record.sequence, record.tokens, record.context)
        except InvalidRequestError:  # of an output that is new and was checked: the index is full
            if not self.shared.sequence_count:
                raise
            return False
        self.shapes.append(record.sequence, record.tokens, record.context)
        if (excess := self.shapes.token_count - _SHAPED) > 0:
            self.shapes.remove(self.shapes.oldest(excess))
        return True

    def holds(self, sequence: int) -> bool:
        return sequence in self._meta

    def adopt(self, index: SuffixIndex, meta: dict[int, SequenceMeta]) -> None:
        with self.lock:
            self.shared = index
            self._meta = meta
            self.shapes = SuffixIndex(shapes=True)
            for sequence in reversed(self._newest()):
                self.shapes.append(sequence, index.tokens(sequence), index.prefix(sequence))

    def _newest(self) -> list[int]:
        """The newest outputs, that one first, which together hold at most _SHAPED tokens."""
        newest, tokens = [], 0
        for sequence in sorted(self._meta, reverse=True):
            tokens += self.shared.length(sequence)
            if tokens > _SHAPED:
                break
            newest.append(sequence)
        return newest

    def evict(self, excess: int) -> int:
        """Free about `excess` bytes; returns how many sequences and sessions were evicted, 0 when none could be.

        What sequences took is given back when `merge` comes to it. Evicts the least recently used from whichever is
        larger, cached past outputs or sessions. A sequence is used when it is added and whenever it predicted a token
        rightly.
        """
        sessions, goal = 0, self.sessions.memory_bytes - excess
        while self.sessions.memory_bytes > max(goal, self._past_bytes() - 1) and self.sessions.evict():
            sessions += 1
        if sessions:
            return sessions
        if self.shared.sequence_count:
            return self._evict_past(max(excess / self._past_bytes(), _LEAST_SHARE))
        return int(self.sessions.evict())

    def _evict_past(self, share: float) -> int:
        gone = self.shared.oldest(max(1, int(share * self.shared.token_count)))
        self.remove(gone.tolist())
        return len(gone)

    def remove(self, sequences: list[int]) -> None:
        with self.lock:
            for index in (self.shared, self.shapes):
                index.remove(np.array(sequences, dtype=np.int64))
            for sequence in sequences:
                self._meta.pop(sequence, None)

    def known(self) -> list[tuple[int, SequenceMeta]]:
        with self.lock:
            return list(self._meta.items())
