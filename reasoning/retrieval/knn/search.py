"""The nearest entries of a datastore: exactly, in one order for everyone; and those of a request's own cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentspec.backends.base import Floats, Scan
from agentspec.reasoning.retrieval.knn.datastore import Datastore, Keys, Values

BLOCK = 4096  # entries whose distances are computed together
CACHED = 4096  # entries that a request's cache holds

Distances = NDArray[np.float64]
Entries = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours:
    """Entries [n] with their squared distances and tokens: nearest first, of equally near ones the smaller id."""

    entries: Entries
    distances: Distances
    tokens: Values


class DatastoreSearch:
    """Exact search. An answer depends on its query alone, not on the batch that it was asked in."""

    def __init__(self, store: Datastore, scan: Scan) -> None:
        self.store = store
        self._scan = scan

    def search(self, queries: Floats, count: int) -> list[Neighbours]:
        """The `count` nearest entries, or all there are, for each of `queries` [q, width]; one pass for all of them.

        The scan only narrows down: what counts is the distance between query and stored key in float64.
        """
        candidates = self._scan.near(queries, count)
        return [self._exact(query, near, count) for query, near in zip(queries, candidates, strict=True)]

    def _exact(self, query: Floats, near: Entries, count: int) -> Neighbours:
        blocks = [near[start : start + BLOCK] for start in range(0, len(near), BLOCK)]
        distances = np.concatenate([squared_distances(self.store.keys[block], query) for block in blocks])
        return nearest(near, distances, self.store.values[near], count)


class NeighbourCache:
    """Entries that a request has come near to: those it found, and what follows each of them in the corpus.

    The text goes on as its neighbours did, so the next query's neighbours are likely among them (RaLMSpec, Zhang et
    al. 2024, section 5.3). The oldest make room for new ones.
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
        """Take in what queries found, with the entries that follow."""
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
        """The `count` nearest entries here, by float32 distances: what is right about them is found out later."""
        halves = self._halves - np.einsum("ij,j->i", self._keys, query)
        best = np.argpartition(halves, min(count, len(halves)) - 1)[:count]
        distances = 2 * halves[best].astype(np.float64) + float(np.square(query, dtype=np.float64).sum())
        return nearest(self._entries[best], distances, self._store.values[self._entries[best]], count)


def squared_distances(keys: Keys, query: Floats) -> Distances:
    """Between each of `keys` [n, width] and `query` [width]: summed key by key, so that company changes nothing."""
    differences = keys.astype(np.float64) - query
    return np.asarray(np.square(differences, out=differences).sum(axis=1))


def nearest(entries: Entries, distances: Distances, tokens: Values, count: int) -> Neighbours:
    """The first `count` by distance, then entry."""
    order = np.lexsort((entries, distances))[:count]
    return Neighbours(entries[order], distances[order], tokens[order])
