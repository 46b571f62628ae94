"""Nearest-neighbour search: exact and reproducible in a datastore, and approximate in a request's cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from agentspec.backends.base import Floats
from agentspec.reasoning.retrieval.knn.datastore import Datastore, Keys, Values

if TYPE_CHECKING:
    from agentspec.backends.torch.model.vector_scan import VectorScan

BLOCK = 4096  # entries whose distances are computed together
CACHED = 4096  # entries that a request's cache holds

Distances = NDArray[np.float64]
Entries = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours:
    """Entries [n] with their squared distances and tokens, nearest first; ties are ordered by entry id."""

    entries: Entries
    distances: Distances
    tokens: Values


class DatastoreSearch:
    """Exact search. A result depends only on its query, not on the other queries of the batch."""

    def __init__(self, store: Datastore, scan: VectorScan) -> None:
        self.store = store
        self._scan = scan

    def search(self, queries: Floats, count: int) -> list[Neighbours]:
        """The `count` nearest entries for each of `queries` [q, width], or all entries if there are fewer, in one pass.

        The scan only selects candidates; float64 distances between query and stored keys rank them.
        """
        candidates = self._scan.near(queries, count)
        return [self._exact(query, near, count) for query, near in zip(queries, candidates, strict=True)]

    def _exact(self, query: Floats, near: Entries, count: int) -> Neighbours:
        blocks = [near[start : start + BLOCK] for start in range(0, len(near), BLOCK)]
        distances = np.concatenate([squared_distances(self.store.keys[block], query) for block in blocks])
        return nearest(near, distances, self.store.values[near], count)


class NeighbourCache:
    """A request's cache of the entries that its searches found and of the entries after each of them in the corpus.

    A text often continues as its neighbours did, so that the cache likely holds the next query's neighbours (RaLMSpec,
    Zhang et al. 2024, section 5.3). New entries evict the oldest.
    """

    def __init__(self, store: Datastore, prefetch: int, capacity: int = CACHED) -> None:
        self._store = store
        self._ahead = np.arange(prefetch + 1)
        self._entries = np.empty(0, np.int64)
        self._capacity = capacity
        self._keys = np.empty((0, store.keys.shape[1]), np.float32)
        self._halves = np.empty(0, np.float32)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, found: Iterable[Neighbours]) -> None:
        """Add found entries, and the entries that follow each of them in the corpus."""
        wanted = np.concatenate([(each.entries[:, None] + self._ahead).ravel() for each in found])
        fresh = np.setdiff1d(wanted[wanted < len(self._store.values)], self._entries)
        keys = self._store.keys[fresh].astype(np.float32)
        keep = max(0, self._capacity - len(fresh))
        kept = slice(max(0, len(self) - keep), None)
        self._entries = np.concatenate([self._entries[kept], fresh])[-self._capacity :]
        self._keys = np.concatenate([self._keys[kept], keys])[-self._capacity :]
        halves = np.einsum("ij,ij->i", keys, keys) / 2
        self._halves = np.concatenate([self._halves[kept], halves])[-self._capacity :]

    def search(self, query: Floats, count: int) -> Neighbours:
        """The `count` nearest cached entries by float32 distances; a search of the datastore verifies them later."""
        halves = self._halves - np.einsum("ij,j->i", self._keys, query)
        best = np.argpartition(halves, min(count, len(halves)) - 1)[:count]
        distances = 2 * halves[best].astype(np.float64) + float(np.square(query, dtype=np.float64).sum())
        return nearest(self._entries[best], distances, self._store.values[self._entries[best]], count)


def squared_distances(keys: Keys, query: Floats) -> Distances:
    """Distances of `keys` [n, width] from `query` [width]. Each row is summed by itself: other keys never change it."""
    differences = keys.astype(np.float64) - query
    return np.asarray(np.square(differences, out=differences).sum(axis=1))


def nearest(entries: Entries, distances: Distances, tokens: Values, count: int) -> Neighbours:
    """The first `count` entries, ordered by distance and then by entry id."""
    order = np.lexsort((entries, distances))[:count]
    return Neighbours(entries[order], distances[order], tokens[order])
