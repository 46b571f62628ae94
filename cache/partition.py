"""One namespace's share of the cache: what it has in common, what it learned, its sessions."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Collection, Iterable
from functools import cache

import numpy as np

from agentspec.cache.deletion import Scope, Selection
from agentspec.cache.index import Drafter, Frozen, SuffixIndex
from agentspec.cache.sequence_meta import Origin
from agentspec.cache.sessions import Sessions
from agentspec.cache.tokens import EMPTY, Tokens
from agentspec.errors import CacheFormatError
from agentspec.types import Namespace

_OVERHEAD = 192 << 10  # bytes of a drafter's learned state and the objects around it
_ORIGIN_BYTES = 256  # bytes of an Origin with its place in the table


class Space:
    """Namespaces share nothing, neither tokens nor what was learned. The caller holds the cache's lock."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.shared = SuffixIndex()
        self.drafter = Drafter()
        self.sessions = Sessions()
        self._reported: dict[int, int] = {}
        self._origins: dict[int, Origin] = {}
        self._origins_lock = threading.Lock()  # outputs are added without the cache's lock
        self.added = 0  # tokens, since this object exists

    def memory_bytes(self) -> int:
        return self._past_bytes() + self.sessions.memory_bytes + _OVERHEAD

    def _past_bytes(self) -> int:
        return self.shared.memory_bytes() + _ORIGIN_BYTES * len(self._origins)

    def share(
        self, sequence: int, tokens: Tokens, context: Tokens, session: str | None = None, created_at: float = 0.0
    ) -> None:
        """Add a finished output that followed `context`."""
        with self._origins_lock:
            self.shared.append(sequence, tokens, context)
            self._origins[sequence] = Origin(session, created_at, int(tokens[-1]) if len(tokens) else -1)
            self.added += len(tokens)

    def holds(self, sequence: int) -> bool:
        """Whether a sequence is in the shared past."""
        return sequence in self._origins

    def adopt(self, index: SuffixIndex, origins: dict[int, Origin]) -> None:
        """Begin with a shared past that was saved, of which no hit is news."""
        usage = index.usage()
        with self._origins_lock:
            self.shared = index
            self._origins = origins
            self._reported = dict(zip(usage.sequences.tolist(), usage.hits.tolist(), strict=True))

    def freeze(self, sequences: Collection[int]) -> tuple[Frozen, dict[int, Origin]]:
        """Those of the sequences that are in the shared past, to be saved, and where they (and others) come from."""
        origins = dict(self._known())
        return self.shared.freeze([number for number in sequences if number in origins]), origins

    def learned(self) -> bytes:
        """What was learned about drafting, for `restore`."""
        return zlib.compress(self.drafter.state().astype("<f8").tobytes(), level=1)

    def restore(self, learned: bytes) -> None:
        """Go on from `learned`; what cannot be read is learned anew."""
        with contextlib.suppress(CacheFormatError, zlib.error, ValueError):
            self.drafter.restore(np.frombuffer(zlib.decompress(learned), dtype="<f8"))

    def evict(self, excess: int) -> int:
        """Give back about `excess` bytes; returns how many sequences and sessions went, 0 when none could.

        The larger of shared past and sessions gives: what was used least recently,
        where being added and every token that was right because of it is a use of a sequence.
        """
        past = self._past_bytes()
        if self.sessions.memory_bytes >= past and self.sessions.evict():
            return 1
        if self.shared.sequence_count:
            return self._evict_past(excess / past)
        return int(self.sessions.evict())

    def _evict_past(self, share: float) -> int:
        usage = self.shared.usage()
        order = np.argsort(usage.last_used, kind="stable")
        quota = max(share, 1 / 16) * self.shared.token_count
        # Removing is one pass over the index whatever it removes, so at least a sixteenth goes at once.
        gone = order[: int(np.searchsorted(np.cumsum(usage.lengths[order]), quota)) + 1]
        self._remove(usage.sequences[gone].tolist())
        return len(gone)

    def _remove(self, sequences: list[int]) -> None:
        with self._origins_lock:
            self.shared.remove(sequences)
            for sequence in sequences:
                self._reported.pop(sequence, None)
                self._origins.pop(sequence, None)

    def _known(self) -> list[tuple[int, Origin]]:
        with self._origins_lock:
            return list(self._origins.items())

    # Forgetting.

    def covered(self, scope: Scope) -> list[int]:
        """The sequences of the shared past that lie in scope."""
        if not scope.concerns(self.namespace):
            return []
        return [number for number, origin in self._known() if scope.covers(origin.session, origin.created_at)]

    def selected(self, selection: Selection) -> list[int]:
        """The sequences of the shared past that a selection means."""
        numbers = self.covered(selection.scope)
        return [number for number in numbers if selection.holds(self._read(number))] if selection.searched else numbers

    def _read(self, sequence: int) -> Tokens:
        """A sequence with what stood before it; empty where it was evicted meanwhile."""
        with contextlib.suppress(KeyError):
            return np.concatenate((self.shared.lead(sequence), self.shared.tokens(sequence)))
        return EMPTY

    def forget(self, sequences: Iterable[int]) -> None:
        """Forget sequences, and the tokens that only they ended with."""
        self._remove(list(sequences))
        state, cells = self.drafter.state(), _cell_count()
        ends = state[cells:].reshape(-1, 3)
        known = np.isin(ends[:, 0], [origin.end for _, origin in self._known()])
        if not known.all():
            self.drafter.restore(np.concatenate((state[:cells], ends[known].ravel())))

    def fresh_hits(self) -> list[tuple[int, int]]:
        """(sequence, hits since the last call) of every sequence that was hit."""
        usage = self.shared.usage()
        hit = np.flatnonzero(usage.hits)
        totals = dict(zip(usage.sequences[hit].tolist(), usage.hits[hit].tolist(), strict=True))
        fresh = [(sequence, total - self._reported.get(sequence, 0)) for sequence, total in totals.items()]
        self._reported = totals
        return [(sequence, hits) for sequence, hits in fresh if hits]


def without_ends(learned: bytes) -> bytes:
    """A learned state without the tokens that outputs ended with: its other numbers are of no text in particular."""
    with contextlib.suppress(zlib.error):
        cells, state = 8 * _cell_count(), zlib.decompress(learned)
        if len(state) >= cells:  # otherwise of an older version, and learned anew
            return zlib.compress(state[:cells], level=1)
    return b""


@cache
def _cell_count() -> int:
    return len(Drafter().state())
