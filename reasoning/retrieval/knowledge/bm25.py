"""BM25 over an index of words: Robertson's ranking with Lucene's weights, as bm25s computes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agentspec.errors import ConfigurationError
from agentspec.reasoning.retrieval.knowledge.base import Document, Hit, Query, best_rows
from agentspec.reasoning.retrieval.knowledge.lexical import K1, B, terms, terms_of, weighed

_WEIGHTS, _VOCABULARY = "bm25.npz", "vocabulary.json"


class Bm25Metric:
    """A document's score is the sum of its weights for the query's terms. Hits carry them: no index is needed."""

    async def encode(self, text: str) -> Query:
        return Query(text, terms(text))

    def scores(self, query: Query, hits: Sequence[Hit]) -> NDArray[np.float64]:
        wanted = terms_of(query)
        return np.array([weighed(wanted, hit.features) for hit in hits], np.float64)


class Bm25Index:
    """Maps each term to its documents with their weights (float64), and each document to its terms.

    `weights` and `rows` [entries] hold the entries term by term; term t has those from `starts[t]` to `starts[t + 1]`.
    `documents` are sorted by id, so that ties are ranked in row order.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        vocabulary: Sequence[str],
        weights: NDArray[np.float64],
        rows: NDArray[np.int32],
        starts: NDArray[np.int64],
    ) -> None:
        self.metric = Bm25Metric()
        self.documents = documents
        self._words = list(vocabulary)
        self._terms = {word: at for at, word in enumerate(self._words)}
        self._weights, self._rows, self._starts = weights, rows, starts
        self._entries = np.argsort(rows, kind="stable")
        self._document_starts = np.searchsorted(rows[self._entries], np.arange(len(documents) + 1))

    @classmethod
    def build(cls, documents: Sequence[Document]) -> Bm25Index:
        """Index titles and texts without English stop words. Raises `ConfigurationError` if no word is left."""
        import bm25s
        from bm25s.stopwords import STOPWORDS_EN

        stopped = frozenset(STOPWORDS_EN)
        texts = [[t for t in terms(f"{one.title} {one.text}") if t not in stopped] for one in documents]
        vocabulary = sorted({term for text in texts for term in text})
        if not vocabulary:
            raise ConfigurationError("the corpus holds no words to search by")
        known = {word: at for at, word in enumerate(vocabulary)}
        model = bm25s.BM25(k1=K1, b=B, method="lucene", dtype="float64")
        model.index(([[known[term] for term in text] for text in texts], known), show_progress=False)
        scores = model.scores
        rows, starts = scores["indices"].astype(np.int32), scores["indptr"].astype(np.int64)
        return cls(documents, vocabulary, scores["data"].astype(np.float64), rows, starts)

    @classmethod
    def load(cls, folder: Path, documents: Sequence[Document]) -> Bm25Index:
        """Load the index that `save` wrote. Raises `OSError`, `ValueError` or `KeyError` for damaged files."""
        with np.load(folder / _WEIGHTS) as arrays:
            weights, rows, starts = arrays["weights"], arrays["rows"], arrays["starts"]
        return cls(documents, json.loads((folder / _VOCABULARY).read_text("utf-8")), weights, rows, starts)

    def save(self, folder: Path) -> None:
        np.savez(folder / _WEIGHTS, weights=self._weights, rows=self._rows, starts=self._starts)
        (folder / _VOCABULARY).write_text(json.dumps(self._words, ensure_ascii=False), "utf-8")

    def search(self, queries: Sequence[Query], count: int) -> list[tuple[Hit, ...]]:
        """The best `count` documents for each query. Documents that share no term with it come last, by id."""
        return [self._search(terms_of(query), count) for query in queries]

    def _search(self, wanted: Sequence[str], count: int) -> tuple[Hit, ...]:
        scores = np.zeros(len(self.documents))
        for term in wanted:
            if (at := self._terms.get(term)) is not None:
                entries = slice(self._starts[at], self._starts[at + 1])
                scores[self._rows[entries]] += self._weights[entries]
        return tuple(Hit(self.documents[row], float(scores[row]), self._own(row)) for row in best_rows(scores, count))

    def _own(self, row: int) -> dict[str, float]:
        """The weights of the terms in one document."""
        entries = self._entries[self._document_starts[row] : self._document_starts[row + 1]]
        at = np.searchsorted(self._starts, entries, side="right") - 1
        return {self._words[term]: float(weight) for term, weight in zip(at, self._weights[entries], strict=True)}
