"""Search by sentence embeddings: exact by a scan of all vectors, or approximate by a graph (HNSW).

A score is the dot product of two float32 vectors, summed in float64 in a fixed order. faiss only finds candidates: its
own scores are not used for ranking, because their rounding depends on the number of queries in a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from agentspec.errors import ConfigurationError
from agentspec.reasoning.retrieval.knowledge.base import Document, Hit, Query, best_rows

Vectors = NDArray[np.float32]
DenseKind = Literal["dense", "hnsw"]

TOGETHER = 8  # from so many queries on, one matrix product is faster than a scan of all vectors for each query
MARGIN = 16  # extra candidates, so that one search nearly always settles the order
LINKS, BUILD_POOL, POOL = 32, 200, 128  # of the graph: edges per vector, candidates in building and in a search
FILE = "index.faiss"
_CHUNK = 65536


class Encoder(Protocol):
    """Turns texts into vectors of length 1."""

    fingerprint: str  # encoders that give different vectors have different ones
    dimensions: int

    async def encode(self, text: str) -> Vectors:
        """The vector [dimensions] of one text, computed by itself."""
        ...

    def encode_all(self, texts: Sequence[str], advance: Callable[[int], None]) -> Vectors:
        """Encode documents in batches as vectors [texts, dimensions]; `advance` receives the number done. Blocks."""
        ...

    def close(self) -> None:
        """Release the model. Idempotent."""
        ...


class DenseMetric:
    """Scores a hit by the dot product of the query's vector and the hit's vector."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder

    async def encode(self, text: str) -> Query:
        return Query(text, await self.encoder.encode(text))

    def scores(self, query: Query, hits: Sequence[Hit]) -> NDArray[np.float64]:
        vectors = np.stack([vector(hit.features, self.encoder.dimensions) for hit in hits])
        return products(vectors, vector(query.features, self.encoder.dimensions))


def products(vectors: Vectors, query: Vectors) -> NDArray[np.float64]:
    """The dot products [n] of `vectors` [n, d] with `query` [d]; every row is summed by itself in the same order."""
    rows = np.ascontiguousarray(vectors, np.float64) * query.astype(np.float64)
    return np.array([np.add.reduce(row) for row in rows], np.float64)


def vector(features: Any, dimensions: int) -> Vectors:
    """Check that `features` is a vector of this size and return it. Raises `ConfigurationError` otherwise."""
    if not (isinstance(features, np.ndarray) and features.shape == (dimensions,) and features.dtype == np.float32):
        raise ConfigurationError(f"not a vector of {dimensions} numbers: use this knowledge base's own metric")
    return features


class DenseIndex:
    """Documents sorted by id, and a faiss index of their vectors in the same order."""

    def __init__(self, documents: Sequence[Document], index: Any, encoder: Encoder) -> None:
        if index.ntotal != len(documents) or index.d != encoder.dimensions:
            raise ValueError(f"{index.ntotal} vectors of {index.d} numbers for {len(documents)} documents")
        self.metric = DenseMetric(encoder)
        self.documents = documents
        self._index = index
        self._vectors = _stored(index)

    @cached_property
    def _longest(self) -> float:
        """The length of the longest vector; a search by a graph needs it not, and does not read all of them."""
        return float(np.sqrt(max(np.einsum("nd,nd->n", part, part).max() for part in _parts(self._vectors))))

    @classmethod
    def build(
        cls,
        documents: Sequence[Document],
        vectors: Vectors,
        encoder: Encoder,
        kind: DenseKind = "dense",
        *,
        advance: Callable[[int], None] = lambda done: None,
    ) -> DenseIndex:
        """Index `vectors` [documents, dimensions]. Raises `ConfigurationError` for numbers that are not finite."""
        import faiss

        if not all(np.isfinite(part).all() for part in _parts(vectors)):
            raise ConfigurationError("the encoder gave vectors with numbers that are not finite")
        index: Any = faiss.IndexFlatIP(vectors.shape[1])
        if kind == "hnsw":
            index = faiss.IndexHNSWFlat(vectors.shape[1], LINKS, faiss.METRIC_INNER_PRODUCT)
            index.hnsw.efConstruction, index.hnsw.efSearch = BUILD_POOL, POOL
        faiss.omp_set_num_threads(1)  # several threads would build a different graph each time
        for part in _parts(vectors):
            index.add(np.ascontiguousarray(part, np.float32))
            advance(len(part))
        return cls(documents, index, encoder)

    @classmethod
    def load(cls, folder: Path, documents: Sequence[Document], encoder: Encoder) -> DenseIndex:
        """Map the index that `save` wrote: the vectors stay in the file. Raises `RuntimeError` or `ValueError` for a
        damaged one.
        """
        import faiss

        return cls(documents, faiss.read_index(str(folder / FILE), faiss.IO_FLAG_MMAP_IFC), encoder)

    def save(self, folder: Path) -> None:
        import faiss

        faiss.write_index(self._index, str(folder / FILE))

    def search(self, queries: Sequence[Query], count: int) -> list[tuple[Hit, ...]]:
        """The best `count` documents for each query; an approximate index finds at most `POOL`."""
        if not queries:
            return []
        import faiss

        faiss.omp_set_num_threads(1)  # of the calling thread only: more compete with the local engine for cores
        matrix = np.stack([vector(query.features, self._index.d) for query in queries])
        return self._approximate(matrix, count) if hasattr(self._index, "hnsw") else self._exact(matrix, count)

    def _approximate(self, queries: Vectors, count: int) -> list[tuple[Hit, ...]]:
        """Rank `POOL` candidates whatever `count` is, so that the best documents do not depend on `count`."""
        _, found = self._index.search(queries, POOL)
        return [self._hits(*self._ranked(rows, query), count) for rows, query in zip(found, queries, strict=True)]

    def _exact(self, queries: Vectors, count: int) -> list[tuple[Hit, ...]]:
        """Rank more and more candidates until no other document can be among the best `count` of any query."""
        hits: list[tuple[Hit, ...]] = [()] * len(queries)
        unsettled, size = list(range(len(queries))), count + MARGIN
        while unsettled:
            size = min(size, len(self.documents))
            coarse, found = self._scan(queries[unsettled], size)
            settled = []
            for at, rows, lowest in zip(unsettled, found, coarse[:, -1], strict=True):
                best, scores = self._ranked(rows, queries[at])
                if size == len(self.documents) or scores[count - 1] > lowest + self._error(queries[at]):
                    hits[at] = self._hits(best, scores, count)
                    settled.append(at)
            unsettled, size = [at for at in unsettled if at not in settled], 4 * size
        return hits

    def _scan(self, queries: Vectors, count: int) -> tuple[Vectors, NDArray[np.int64]]:
        """The highest scores [queries, count] as faiss computes them, and their rows."""
        import faiss

        # The threshold is global to the process. No result depends on it, so it need not be restored.
        faiss.cvar.distance_compute_blas_threshold = 0 if len(queries) >= TOGETHER else 1 << 30
        coarse, rows = self._index.search(queries, count)
        return coarse, rows

    def _error(self, query: Vectors) -> float:
        """The most that a float32 score may be off: twice the bound d u |x| |y|, which holds for sums in any order."""
        return float(2.0**-23 * self._index.d * self._longest * np.linalg.norm(query))

    def _ranked(self, rows: NDArray[np.int64], query: Vectors) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The candidates by rank, with their scores. In `rows`, faiss fills up with -1."""
        rows = np.sort(rows[rows >= 0])
        scores = products(self._vectors[rows], query)
        order = best_rows(scores, len(scores))
        return rows[order], scores[order]

    def _hits(self, rows: NDArray[np.int64], scores: NDArray[np.float64], count: int) -> tuple[Hit, ...]:
        return tuple(
            Hit(self.documents[row], float(score), self._vectors[row].copy())
            for row, score in zip(rows[:count], scores[:count], strict=True)
        )


def _parts(vectors: Vectors) -> list[Vectors]:
    return [vectors[at : at + _CHUNK] for at in range(0, len(vectors), _CHUNK)]


def _stored(index: Any) -> Vectors:
    """A view of the vectors [n, d] inside a faiss index; the index must outlive the view."""
    import faiss

    flat: Any = faiss.downcast_index(index.storage) if hasattr(index, "hnsw") else index
    vectors: Vectors = faiss.rev_swig_ptr(flat.get_xb(), index.ntotal * index.d).reshape(index.ntotal, index.d)
    return vectors
