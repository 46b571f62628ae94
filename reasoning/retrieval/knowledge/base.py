"""What a knowledge base is: batched search over documents, its version, and how it ranks.

Ranking is a total order: the higher score first, of equal scores the smaller document id. A query's answer does not
depend on which queries it was asked together with; a knowledge base that cannot promise that cannot be speculated on
exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Document:
    """A document by its id; two with one id are the same document."""

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """A query's text and what its knowledge base searches by: a vector [dimensions], token ids, or nothing more."""

    text: str
    features: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Hit:
    """A document found. `features` is what the metric needs to score it again: a vector, term weights, or nothing."""

    document: Document
    score: float
    features: Any = None


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The answer to a batch of queries: for each the best documents, best first, all of one `version`."""

    version: str
    hits: tuple[tuple[Hit, ...], ...]


class Metric(Protocol):
    """How a knowledge base ranks, for scoring a few documents here: its best document, if among them, is the best."""

    async def encode(self, text: str) -> Query:
        """The query of one text; always encoded by itself, so that nothing depends on its company."""
        ...

    def scores(self, query: Query, hits: Sequence[Hit]) -> NDArray[np.float64]:
        """The score of each hit's document [len(hits)] for `query`."""
        ...


@runtime_checkable
class KnowledgeBase(Protocol):
    """Documents that can be searched. Safe to call from several tasks of one event loop at once."""

    @property
    def metric(self) -> Metric: ...

    async def search(self, queries: Sequence[Query], count: int) -> SearchResult:
        """The best `count` documents for each query, or as many as there are; a larger count begins with the same ones.

        Raises `KnowledgeBaseError` when it cannot be asked, `ConfigurationError` for queries of another metric.
        """
        ...

    async def aclose(self) -> None:
        """Release every resource. Idempotent."""
        ...


def ranked(hits: Sequence[Hit], scores: NDArray[np.float64]) -> list[Hit]:
    """`hits` in the order of `scores`, the smaller id first among equals."""
    order = sorted(range(len(hits)), key=lambda i: (-scores[i], hits[i].document.id))
    return [hits[i] for i in order]


def best_rows(scores: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """The places of the `count` highest scores, or of all if there are fewer: better first, of equals the earlier.

    An index whose rows stand in the order of their documents' ids thus ranks as `ranked` does.
    """
    chosen = np.arange(len(scores))
    if count < len(scores):
        last = np.partition(scores, len(scores) - count)[len(scores) - count]
        above = np.flatnonzero(scores > last)
        chosen = np.concatenate([above, np.flatnonzero(scores == last)[: count - len(above)]])
    return chosen[np.lexsort((chosen, -scores[chosen]))]
