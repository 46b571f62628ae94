"""Ranking by words: Robertson's BM25 with Lucene's weights, as bm25s computes them, over an index of words or, where a
knowledge base's own ranking is unknown, over the cached documents alone.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agentspec.errors import ConfigurationError
from agentspec.reasoning.retrieval.knowledge.base import Document, Hit, Query, best_rows

K1, B = 1.5, 0.75  # as bm25s sets them
_WEIGHTS, _VOCABULARY = "bm25.npz", "vocabulary.json"


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


def weighed(query: Sequence[str], weights: Mapping[str, float]) -> float:
    """The sum of the weights of the query's terms, added in the query's order, so that it is always bit-identical."""
    total = 0.0
    for term in query:
        total += weights.get(term, 0.0)
    return total


class LexicalMetric:
    """BM25 over the cached documents alone; each hit carries the counts of its terms.

    It approximates the ranking of a knowledge base with an unknown metric: it often agrees, but need not.
    """

    async def encode(self, text: str) -> Query:
        return Query(text, terms(text))

    def scores(self, query: Query, hits: Sequence[Hit]) -> NDArray[np.float64]:
        counts: list[Counter[str]] = [hit.features for hit in hits]
        lengths = [sum(count.values()) for count in counts]
        mean = sum(lengths) / max(len(hits), 1) or 1.0
        wanted = terms_of(query)
        rarity = {term: _idf(sum(term in count for count in counts), len(hits)) for term in set(wanted)}
        return np.array(
            [
                weighed(wanted, {term: rarity[term] * _saturated(count[term], length / mean) for term in rarity})
                for count, length in zip(counts, lengths, strict=True)
            ],
            np.float64,
        )


def with_counts(hit: Hit) -> Hit:
    """`hit` with the counts of its document's terms, which `LexicalMetric` needs."""
    return replace(hit, features=Counter(terms(f"{hit.document.title} {hit.document.text}")))


def _idf(having: int, total: int) -> float:
    return math.log(1 + (total - having + 0.5) / (having + 0.5))


def _saturated(count: int, relative_length: float) -> float:
    return count / (count + K1 * (1 - B + B * relative_length))


class Bm25Metric(LexicalMetric):
    """A document's score is the sum of its weights for the query's terms. Hits carry them: no index is needed."""

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
