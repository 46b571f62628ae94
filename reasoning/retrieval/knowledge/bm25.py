"""Ranking by words: Robertson's BM25 with Lucene's weights, as bm25s computes them, or, where a knowledge base's own
ranking is unknown, by the rarity of words in the cached documents.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agentspec.errors import ConfigurationError
from agentspec.reasoning.retrieval.knowledge.base import Document, Hit, Query, best_rows

K1, B = 1.5, 0.75  # as bm25s sets them
WEIGHTS, VOCABULARY = "bm25.npz", "vocabulary.json"


@cache
def _term() -> re.Pattern[str]:
    """A word, with the vowel signs and accents that follow their letter, which `\\w` leaves out."""
    marks = "".join(mark for mark in map(chr, range(0x300, 0x10000)) if unicodedata.category(mark) in ("Mn", "Mc"))
    return re.compile(rf"\w[\w{marks}]+")


def terms(text: str) -> tuple[str, ...]:
    """All words of `text` with two letters or more, in lower case and in order, with repetitions.

    Vowel signs count as letters, and an accent is the same however it is encoded.
    """
    return tuple(_term().findall(unicodedata.normalize("NFC", text.lower())))


def terms_of(query: Query) -> tuple[str, ...]:
    """The terms that `query` searches by. Raises `ConfigurationError` for a query of another metric."""
    if not isinstance(query.features, tuple):
        raise ConfigurationError("the query was not encoded for words: use this knowledge base's own metric")
    return query.features


class LexicalMetric:
    """Ranks the cached documents by the rare words that they share with the query; each hit carries its terms.

    It approximates the ranking of a knowledge base with an unknown metric: it often agrees, but need not.
    """

    async def encode(self, text: str) -> Query:
        return Query(text, terms(text))

    def scores(self, query: Query, hits: Sequence[Hit]) -> NDArray[np.float64]:
        wanted = dict.fromkeys(terms_of(query))
        rarity = {term: math.log(1 + len(hits) / (1 + sum(term in hit.features for hit in hits))) for term in wanted}
        shared = [sum(rare for term, rare in rarity.items() if term in hit.features) for hit in hits]
        return np.array(shared, np.float64) / [math.sqrt(len(hit.features) or 1) for hit in hits]


def with_terms(hit: Hit) -> Hit:
    """`hit` with the terms of its document, which `LexicalMetric` needs."""
    return replace(hit, features=frozenset(terms(f"{hit.document.title} {hit.document.text}")))


class Bm25Metric(LexicalMetric):
    """A document's score is the sum of its weights for the query's terms. Hits carry them: no index is needed."""

    def scores(self, query: Query, hits: Sequence[Hit]) -> NDArray[np.float64]:
        scores = np.zeros(len(hits))
        for term in terms_of(query):  # added in the query's order, so that the sum is always bit-identical
            scores += [hit.features.get(term, 0.0) for hit in hits]
        return scores


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
        with np.load(folder / WEIGHTS) as arrays:
            weights, rows, starts = arrays["weights"], arrays["rows"], arrays["starts"]
        return cls(documents, json.loads((folder / VOCABULARY).read_text("utf-8")), weights, rows, starts)

    def save(self, folder: Path) -> None:
        np.savez(folder / WEIGHTS, weights=self._weights, rows=self._rows, starts=self._starts)
        (folder / VOCABULARY).write_text(json.dumps(self._words, ensure_ascii=False), "utf-8")

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
