"""Keeps the KV slots of earlier requests, so that the next prompt of a conversation need not be computed again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentspec.backends.torch.model.kv_cache import SequenceCache

WASTE = 1.25  # caches with more capacity per used slot than this are trimmed before they are kept
SHORTEST = 8  # a shorter common prefix is faster to compute again than to copy


@dataclass(frozen=True, slots=True)
class PrefixEntry:
    """The KV slots of one earlier sequence; `tokens[i]` is the token of slot i."""

    tenant: str
    tokens: NDArray[np.int64]
    cache: SequenceCache


class PrefixCache:
    """Caches sequences by tenant and finds them by longest common prefix; evicts the least recently used first.

    `find` returns copies of the slots, so that branches of one conversation can run at once. Not thread-safe.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._entries: OrderedDict[int, PrefixEntry] = OrderedDict()
        self._next = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, tenant: str, tokens: Sequence[int], capacity: int) -> SequenceCache | None:
        """A copy of the slots of the tenant's longest cached prefix of `tokens`, with room for `capacity` slots; None
        if that prefix has fewer than `SHORTEST` tokens.
        """
        wanted = np.asarray(tokens, dtype=np.int64)
        matches = [
            (common_prefix(entry.tokens, wanted), key) for key, entry in self._entries.items() if entry.tenant == tenant
        ]
        length, key = max(matches, default=(0, 0))
        if length < SHORTEST:
            return None
        self._entries.move_to_end(key)
        return self._entries[key].cache.copy(length, capacity)

    def keep(self, tenant: str, tokens: Sequence[int], cache: SequenceCache) -> None:
        """Keep `cache`, the slots of `tokens`, unless they are cached already; evict entries that `tokens` extend."""
        assert len(tokens) == cache.length, f"{cache.length} slots for {len(tokens)} tokens"
        if cache.length < SHORTEST:
            return
        if cache.capacity > WASTE * cache.length:
            cache = cache.copy(cache.length, cache.length)
        if cache.nbytes > self._limit:
            return
        own = np.asarray(tokens, dtype=np.int64)
        for key, entry in list(self._entries.items()):
            shared = common_prefix(entry.tokens, own) if entry.tenant == tenant else -1
            if shared == len(own):
                return
            if shared == len(entry.tokens):
                self._drop(key)
        self._entries[self._next] = PrefixEntry(tenant, own, cache)
        self._next += 1
        self.nbytes += cache.nbytes
        while self.nbytes > self._limit:
            self._drop(next(iter(self._entries)))

    def clear(self) -> None:
        self._entries.clear()
        self.nbytes = 0

    def _drop(self, key: int) -> None:
        self.nbytes -= self._entries.pop(key).cache.nbytes


def common_prefix(left: NDArray[np.int64], right: NDArray[np.int64]) -> int:
    """The number of leading tokens that two sequences have in common."""
    size = min(len(left), len(right))
    differs = np.flatnonzero(left[:size] != right[:size])
    return int(differs[0]) if len(differs) else size
