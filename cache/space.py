"""One namespace's share of the cache: what it has in common, what it learned, its sessions."""

from __future__ import annotations

import contextlib
import zlib

import numpy as np

from agentspec.cache.index import Drafter, SuffixIndex
from agentspec.cache.sessions import Sessions
from agentspec.cache.tokens import Tokens
from agentspec.errors import CacheFormatError
from agentspec.types import Namespace

_OVERHEAD = 192 << 10  # bytes of a drafter's learned state and the objects around it


class Space:
    """Namespaces share nothing, neither tokens nor what was learned. The caller holds the cache's lock."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.shared = SuffixIndex()
        self.drafter = Drafter()
        self.sessions = Sessions()
        self._reported: dict[int, int] = {}

    def memory_bytes(self) -> int:
        return self.shared.memory_bytes() + self.sessions.memory_bytes + _OVERHEAD

    def share(self, sequence: int, tokens: Tokens, context: Tokens) -> None:
        """Add a finished output that followed `context`."""
        self.shared.append(sequence, tokens, context)

    def learned(self) -> bytes:
        """What was learned about drafting, for `restore`."""
        return zlib.compress(self.drafter.state().astype("<f8").tobytes(), level=1)

    def restore(self, learned: bytes) -> None:
        """Go on from `learned`; what cannot be read is learned anew."""
        with contextlib.suppress(CacheFormatError, zlib.error, ValueError):
            self.drafter.restore(np.frombuffer(zlib.decompress(learned), dtype="<f8"))

    def evict(self, excess: int) -> int:
        """Give back about `excess` bytes; returns how many sequences and sessions went, 0 when none could.

        The larger of shared past and sessions gives, least recently used (for the past: least recently hit) first.
        """
        past = self.shared.memory_bytes()
        if self.sessions.memory_bytes >= past and self.sessions.evict():
            return 1
        if self.shared.sequence_count:
            return self._evict_past(excess / past)
        return int(self.sessions.evict())

    def _evict_past(self, share: float) -> int:
        usage = self.shared.usage()
        order = np.argsort(usage.last_used)
        quota = max(share, 1 / 16) * self.shared.token_count
        # Removing is one pass over the index whatever it removes, so at least a sixteenth goes at once.
        gone = order[: int(np.searchsorted(np.cumsum(usage.lengths[order]), quota)) + 1]
        self.shared.remove(usage.sequences[gone])
        for sequence in usage.sequences[gone].tolist():
            self._reported.pop(sequence, None)
        return len(gone)

    def fresh_hits(self) -> list[tuple[int, int]]:
        """(sequence, hits since the last call) of every sequence that was hit."""
        usage = self.shared.usage()
        hit = np.flatnonzero(usage.hits)
        totals = dict(zip(usage.sequences[hit].tolist(), usage.hits[hit].tolist(), strict=True))
        fresh = [(sequence, total - self._reported.get(sequence, 0)) for sequence, total in totals.items()]
        self._reported = totals
        return [(sequence, hits) for sequence, hits in fresh if hits]
