"""Search by sentence embeddings: exact by a scan of all vectors, or approximate by a graph (HNSW).

A score is the dot product of two float32 vectors, summed in float64 in one fixed order. faiss finds candidates; its own
scores, whose rounding depends on how many queries share a call, decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from agentspec.errors import ConfigurationError
from agentspec.reasoning.retrieval.knowledge.base import Document, Hit, Query, best_rows

Vectors = NDArray[np.float32]
DenseKind = Literal["dense", "hnsw"]

TOGETHER = 8  # queries from which one matrix product is faster than as many scans, which read the vectors once each
MARGIN = 16  # candidates beyond those asked for, so that one look nearly always settles the order
LINKS, BUILD_POOL, POOL = 32, 200, 128  # of the graph: edges a vector, candidates while it is built, and in a search
_FILE = "index.faiss"
_CHUNK = 65536


class Encoder(Protocol):
    """Turns texts into vectors of length 1."""

    @property
    def fingerprint(self) -> str:
        """Changes with the vectors that it gives."""
        ...

    @property
    def dimensions(self) -> int: ...

    async def encode(self, text: str) -> Vectors:
        """The vector [dimensions] of one text, computed by itself."""
        ...

    def encode_all(self, texts: Sequence[str], advance: Callable[[int], None]) -> Vectors:
        """The vectors [texts, dimensions] of documents, in batches; `advance` gets how many are done. Blocks."""
        ...

    def close(self) -> None:
        """Release the model. Idempotent."""
        ...


class DenseMetric:
    """The dot product with a hit's own vector."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder

    async def encode(self, text: str) -> Query:
        return Query(text, await self.encoder.encode(text))

    def scores(self, query: Query, hits: Sequence[Hit]) -> NDArray[np.float64]:
        if not hits:
            return np.empty(0, np.float64)
        vectors = np.stack([vector(hit.features, self.encoder.dimensions) for hit in hits])
        return products(vectors, vector(query.features, self.encoder.dimensions))


def products(vectors: Vectors, query: Vectors) -> NDArray[np.float64]:
    """The dot products [n] of `vectors` [n, d] with `query` [d]; each row is summed by itself, in the same order."""
    rows = np.ascontiguousarray(vectors, np.float64) * query.astype(np.float64)
    return np.array([np.add.reduce(row) for row in rows], np.float64)


def vector(features: Any, dimensions: int) -> Vectors:
    """`features` as the vector it has to be. Raises `ConfigurationError` for anything else."""
    if not (isinstance(features, np.ndarray) and features.shape == (dimensions,) and features.dtype == np.float32):
        raise ConfigurationError(f"not a vector of {dimensions} numbers: use this knowledge base's own metric")
    return features


class DenseIndex:
    """Documents in the order of their ids and the faiss index over their vectors, in the same order.

    `threads` are those of one search. More than one compete with the local engine for its cores.
    """

    def __init__(self, documents: Sequence[Document], index: Any, encoder: Encoder, *, threads: int = 1) -> None:
        if index.ntotal != len(documents) or index.d != encoder.dimensions:
            raise ValueError(f"{index.ntotal} vectors of {index.d} numbers for {len(documents)} documents")
        self.metric = DenseMetric(encoder)
        self.documents = documents
        self._index, self._threads = index, threads
        self._vectors = _stored(index)
        self._longest = float(np.sqrt(max(np.einsum("nd,nd->n", part, part).max() for part in _parts(self._vectors))))

    @classmethod
    def build(
        cls,
        documents: Sequence[Document],
        vectors: Vectors,
        encoder: Encoder,
        kind: DenseKind = "dense",
        *,
        threads: int = 1,
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
        faiss.omp_set_num_threads(1)  # a graph built by several threads is never the same twice
        for part in _parts(vectors):
            index.add(np.ascontiguousarray(part, np.float32))
            advance(len(part))
        return cls(documents, index, encoder, threads=threads)

    @classmethod
    def load(cls, folder: Path, documents: Sequence[Document], encoder: Encoder, *, threads: int = 1) -> DenseIndex:
        """The index that `save` wrote. Raises `RuntimeError` or `ValueError` for a file that is not whole."""
        import faiss

        return cls(documents, faiss.read_index(str(folder / _FILE)), encoder, threads=threads)

    def save(self, folder: Path) -> None:
        import faiss

        faiss.write_index(self._index, str(folder / _FILE))

    @property
    def approximate(self) -> bool:
        return hasattr(self._index, "hnsw")

    def search(self, queries: Sequence[Query], count: int) -> list[tuple[Hit, ...]]:
        """The best `count` documents for each query; an approximate index gives at most `POOL`."""
        if not queries:
            return []
        import faiss

        faiss.omp_set_num_threads(self._threads)  # holds for the calling thread alone
        matrix = np.stack([vector(query.features, self._index.d) for query in queries])
        return self._approximate(matrix, count) if self.approximate else self._exact(matrix, count)

    def _approximate(self, queries: Vectors, count: int) -> list[tuple[Hit, ...]]:
        """As many candidates whatever `count` is, so that the best do not depend on it."""
        _, found = self._index.search(queries, POOL)
        return [self._hits(*self._ranked(rows, query), count) for rows, query in zip(found, queries, strict=True)]

    def _exact(self, queries: Vectors, count: int) -> list[tuple[Hit, ...]]:
        """Look at ever more candidates until no other document can belong to the best `count` of any query."""
        hits: list[tuple[Hit, ...]] = [()] * len(queries)
        unsettled, size = list(range(len(queries))), count + MARGIN
        while unsettled:
            size = min(size, len(self.documents))
            coarse, found = self._scan(queries[unsettled], size)
            settled = []
            for at, rows, lowest in zip(unsettled, found, coarse[:, -1], strict=True):
                places, scores = self._ranked(rows, queries[at])
                if size == len(self.documents) or scores[count - 1] > lowest + self._error(queries[at]):
                    hits[at] = self._hits(places, scores, count)
                    settled.append(at)
            unsettled, size = [at for at in unsettled if at not in settled], 4 * size
        return hits

    def _scan(self, queries: Vectors, count: int) -> tuple[Vectors, NDArray[np.int64]]:
        """The highest scores [queries, count] as faiss computes them, and their rows."""
        import faiss

        # The threshold is the whole process's, but no result depends on it: nothing has to be put back.
        faiss.cvar.distance_compute_blas_threshold = 0 if len(queries) >= TOGETHER else 1 << 30
        coarse, rows = self._index.search(queries, count)
        return coarse, rows

    def _error(self, query: Vectors) -> float:
        """How far a float32 score may be off: twice the bound d u |x| |y|, which holds for sums in any order."""
        return float(2.0**-23 * self._index.d * self._longest * np.linalg.norm(query))

    def _ranked(self, rows: NDArray[np.int64], query: Vectors) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Candidates in order, with their scores; faiss marks places that it could not fill with -1."""
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
    """The vectors [n, d] inside a faiss index, not a copy; the index must outlive them."""
    import faiss

    flat: Any = faiss.downcast_index(index.storage) if hasattr(index, "hnsw") else index
    vectors: Vectors = faiss.rev_swig_ptr(flat.get_xb(), index.ntotal * index.d).reshape(index.ntotal, index.d)
    return vectors
