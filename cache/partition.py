"""One namespace's part of the cache: its cached past outputs, its drafter's learned state, its sessions and groups."""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import cache

import numpy as np

from agentspec.cache.deletion import Scope, Selection
from agentspec.cache.index import Frozen, IndexDrafter, SuffixIndex
from agentspec.cache.memory.group import Group, Membership
from agentspec.cache.memory.sessions import Sessions
from agentspec.cache.record import SequenceMeta, SequenceRecord
from agentspec.cache.tokens import EMPTY, MOST_LEARNED, Tokens, inflate
from agentspec.errors import CacheFormatError, InvalidRequestError
from agentspec.types import Namespace

_OVERHEAD = 2048  # bytes of the Python objects of an empty namespace
_META_BYTES = 256  # bytes of a SequenceMeta with its place in the table
_LEAST_SHARE = 1 / 16  # of the outputs, to evict at once: an index gives memory back once so much of a run is removed


class Partition:
    """One namespace's outputs, drafter, sessions and groups. Namespaces share neither tokens nor learned states.

    `lock` guards all but drafting and `merge`, which nobody waits for; whoever takes it from outside looks whether the
    partition is `retired`: then it has left the cache, and a request that comes later gets another. What a namespace
    has not changed takes no memory.
    """

    __slots__ = (
        "_groups",
        "_learned_version",
        "_meta",
        "added",
        "drafter",
        "group_bytes",
        "load_at",
        "loaded",
        "lock",
        "measured",
        "merging",
        "namespace",
        "owed",
        "retired",
        "saved",
        "sessions",
        "shared",
        "used_at",
    )

    def __init__(self, namespace: Namespace, *, loaded: bool = True) -> None:
        self.namespace = namespace
        self.lock = threading.RLock()
        self.merging = threading.Lock()
        self.shared = SuffixIndex(deferred=True)
        self.drafter = IndexDrafter()
        self.sessions = Sessions()
        self.load_at = 0.0  # when loading is tried again
        self.loaded = loaded  # whether it has what the store has
        self.retired = False
        self.added = 0  # tokens added since this object was made
        self.saved = 0  # of them, those of them in the segment on disk
        self.measured = 0  # bytes that the table has booked for it,
        self.owed = 0  # and for its text that is gone but not merged away
        self.used_at = time.monotonic()
        self.group_bytes = 0
        self._groups: dict[str, Group] = {}
        self._learned_version = self.learning
        self._meta: dict[int, SequenceMeta] = {}

    @property
    def is_empty(self) -> bool:
        return not len(self.sessions) and not self.shared.sequence_count and not self._groups

    @property
    def learning(self) -> int:
        """Grows whenever the drafter learns."""
        return self.drafter.version

    def idle_since(self, seconds: float) -> bool:
        """Whether no request is open, and none was begun for so many seconds."""
        return not self.sessions.busy and time.monotonic() - self.used_at >= seconds

    def memory_bytes(self) -> int:
        own = self.drafter.memory_bytes() + _OVERHEAD
        return self._past_bytes() + self.sessions.memory_bytes + self.group_bytes + own

    def _past_bytes(self) -> int:
        return self.shared.memory_bytes() + _META_BYTES * len(self._meta)

    def reclaimable_bytes(self) -> int:
        """Bytes of text that is gone, among `memory_bytes`: merging gives them back."""
        return self.shared.reclaimable_bytes()

    def merge(self, enough: Callable[[], bool], *, wait: bool = True) -> None:
        """Do the work that adding and deleting have put off, a piece at a time, until `enough()`.

        Only one thread does it at a time; without `wait` the others leave it to that one. No lock need be held.
        """
        if self.merging.acquire(blocking=wait):
            try:
                while not enough() and self.shared.merge_step():
                    pass
            finally:
                self.merging.release()

    def add(self, record: SequenceRecord) -> None:
        """Add a finished output to the cached past outputs."""
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
        return True

    def holds(self, sequence: int) -> bool:
        """Whether a sequence is among the cached past outputs."""
        return sequence in self._meta

    # Groups.

    def join(self, name: str, context: Tokens) -> Membership:
        """A further member of the group of that name."""
        group = self._groups.setdefault(name, Group())
        group.members += 1
        self.measure_group(group)
        return group.join(context)

    def leave(self, name: str, member: Membership) -> None:
        """A member has ended; with the last the group's text goes."""
        member.group.members -= 1
        if member.group.members:
            self.measure_group(member.group)
        else:
            self.group_bytes -= member.group.measured
            del self._groups[name]

    def measure_group(self, group: Group) -> None:
        """Account for a group's present size."""
        size = group.size()
        self.group_bytes += size - group.measured
        group.measured = size

    def adopt(self, index: SuffixIndex, meta: dict[int, SequenceMeta]) -> None:
        """Use a saved index as the cached past outputs."""
        with self.lock:
            self.shared = index
            self._meta = meta

    def freeze(self, sequences: Collection[int]) -> tuple[Frozen, dict[int, SequenceMeta]]:
        """Freeze the index of those `sequences` that are cached here, to save it; also returns all cached metadata."""
        meta = dict(self._known())
        return self.shared.freeze([number for number in sequences if number in meta]), meta

    def learned(self) -> bytes:
        """The drafter's learned state as bytes, for `restore`."""
        return zlib.compress(self.drafter.state().astype("<f8").tobytes(), level=1)

    def fresh_learned(self) -> bytes | None:
        """The learned state; None where it is what `restore` got, or the last call returned."""
        version = self.learning
        if version == self._learned_version:
            return None
        self._learned_version = version
        return self.learned()

    def restore(self, learned: bytes, *, saved: bool = True) -> None:
        """Continue from the state `learned`; if it cannot be read, the drafter learns from the start."""
        with contextlib.suppress(CacheFormatError, zlib.error, ValueError):
            self.drafter.restore(np.frombuffer(inflate(learned, MOST_LEARNED), dtype="<f8"))
        self._learned_version = self.learning if saved else -1

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
        self._remove(gone.tolist())
        return len(gone)

    def _remove(self, sequences: list[int]) -> None:
        with self.lock:
            self.shared.remove(sequences)
            for sequence in sequences:
                self._meta.pop(sequence, None)

    def _known(self) -> list[tuple[int, SequenceMeta]]:
        with self.lock:
            return list(self._meta.items())

    # Deletions.

    def covered(self, scope: Scope) -> list[int]:
        """The cached sequences that lie in `scope`. The caller has checked that it concerns this namespace."""
        known = self._known()
        named = replace(scope, before=None)
        sessions = {session for session in {meta.session for _, meta in known} if named.covers(session, 0.0)}  # hashes
        aged = replace(scope, session=None)
        return [number for number, meta in known if meta.session in sessions and aged.covers(None, meta.created_at)]

    def selected(self, selection: Selection) -> list[int]:
        """The cached sequences that a selection matches."""
        numbers = self.covered(selection.scope)
        return [number for number in numbers if selection.holds(self._read(number))] if selection.searched else numbers

    def _read(self, sequence: int) -> Tokens:
        """A sequence after its context tokens; empty if it was evicted meanwhile."""
        with contextlib.suppress(KeyError):
            return np.concatenate((self.shared.prefix(sequence), self.shared.tokens(sequence)))
        return EMPTY

    def forget(self, sequences: Iterable[int]) -> None:
        """Delete sequences, and from the learned state the end tokens that no other sequence has."""
        self._remove(list(sequences))
        state, cells = self.drafter.state(), _cell_count()
        ends = state[cells:].reshape(-1, 3)
        known = np.isin(ends[:, 0], [meta.end for _, meta in self._known()])
        if not known.all():
            self.drafter.restore(np.concatenate((state[:cells], ends[known].ravel())))


def without_ends(learned: bytes) -> bytes:
    """A learned state without the end tokens of outputs: its other numbers reveal no text."""
    with contextlib.suppress(zlib.error, ValueError):
        cells, state = 8 * _cell_count(), inflate(learned, MOST_LEARNED)
        if len(state) >= cells:  # a shorter state is of an older version, and is dropped
            return zlib.compress(state[:cells], level=1)
    return b""


@cache
def _cell_count() -> int:
    return len(IndexDrafter().state())
