"""Ranking by words: splits texts into terms, and scores documents that come without weights or vectors."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from agentspec.errors import ConfigurationError
from agentspec.reasoning.retrieval.knowledge.base import Hit, Query

K1, B = 1.5, 0.75  # of BM25, as bm25s sets them


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

    It approximates the ranking of a knowledge base whose own metric is unknown: it often agrees, but need not.
    """

    async def encode(self, text: str) -> Query:
        return Query(text, terms(text))

    def scores(self, query: Query, hits: Sequence[Hit]) -> NDArray[np.float64]:
        counts = [_counts(hit) for hit in hits]
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


def _counts(hit: Hit) -> Mapping[str, int]:
    if not isinstance(hit.features, Counter):
        raise ConfigurationError(f"document {hit.document.id!r} carries no counts of its terms")
    return hit.features


def _idf(having: int, total: int) -> float:
    return math.log(1 + (total - having + 0.5) / (having + 0.5))


def _saturated(count: int, relative_length: float) -> float:
    return count / (count + K1 * (1 - B + B * relative_length))
