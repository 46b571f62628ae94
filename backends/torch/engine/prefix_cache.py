"""Key/value rows of earlier calls: the next prompt of a conversation is not computed again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentspec.backends.torch.model.kv_cache import SequenceCache

WASTE = 1.25  # rows with more unused room than this are trimmed before they are kept
SHORTEST = 8  # a shorter common prefix is computed again sooner than copied


@dataclass(frozen=True, slots=True)
class PrefixEntry:
    """The rows of one finished sequence; `tokens[i]` is the token of row i."""

    tenant: str
    tokens: NDArray[np.int64]
    rows: SequenceCache


class PrefixCache:
    """Finished sequences by tenant, found by longest common prefix, the least recently used evicted first.

    Rows handed out are copies, so that branches of one conversation may run at once. Not thread-safe.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._kept: OrderedDict[int, PrefixEntry] = OrderedDict()
        self._next = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, tenant: str, tokens: Sequence[int], capacity: int) -> SequenceCache | None:
        """Rows of the longest prefix of `tokens` known for this tenant, with room for `capacity`; None if short."""
        wanted = np.asarray(tokens, dtype=np.int64)
        matches = [
            (common_prefix(kept.tokens, wanted), key) for key, kept in self._kept.items() if kept.tenant == tenant
        ]
        length, key = max(matches, default=(0, 0))
        if length < SHORTEST:
            return None
        self._kept.move_to_end(key)
        return self._kept[key].rows.copy(length, capacity)

    def keep(self, tenant: str, tokens: Sequence[int], rows: SequenceCache) -> None:
        """Take over `rows`, those of `tokens`, unless they are known; sequences that they extend are dropped."""
        assert len(tokens) == rows.length, f"{rows.length} rows for {len(tokens)} tokens"
        if rows.length < SHORTEST:
            return
        if rows.capacity > WASTE * rows.length:
            rows = rows.copy(rows.length, rows.length)
        if rows.nbytes > self._limit:
            return
        own = np.asarray(tokens, dtype=np.int64)
        for key, kept in list(self._kept.items()):
            shared = common_prefix(kept.tokens, own) if kept.tenant == tenant else -1
            if shared == len(own):
                return
            if shared == len(kept.tokens):
                self._drop(key)
        self._kept[self._next] = PrefixEntry(tenant, own, rows)
        self._next += 1
        self.nbytes += rows.nbytes
        while self.nbytes > self._limit:
            self._drop(next(iter(self._kept)))

    def clear(self) -> None:
        self._kept.clear()
        self.nbytes = 0

    def _drop(self, key: int) -> None:
        self.nbytes -= self._kept.pop(key).rows.nbytes


def common_prefix(left: NDArray[np.int64], right: NDArray[np.int64]) -> int:
    """How many leading tokens two sequences share."""
    size = min(len(left), len(right))
    differs = np.flatnonzero(left[:size] != right[:size])
    return int(differs[0]) if len(differs) else size
