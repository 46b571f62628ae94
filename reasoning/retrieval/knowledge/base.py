"""Knowledge bases: batched search over documents, a version, a metric that ranks, and a request's cache of documents.

Documents are ranked by score, highest first, and ties by document id, smallest first. A query's result must not depend
on the other queries of its batch; otherwise speculation could change answers.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from agentspec.telemetry import tracing


@dataclass(frozen=True, slots=True)
class Document:
    """A document. Two documents with the same id are the same document."""

    id: str
    text: str
    title: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """A query's text, and the features that the knowledge base searches by: a vector [dimensions], words, or None."""

    text: str
    features: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Hit:
    """A found document. With `features` the metric can score it again: a vector, term weights, or None."""

    document: Document
    score: float
    features: Any = None


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a batch of queries: for each query its best documents, best first, all of one `version`."""

    version: str
    hits: tuple[tuple[Hit, ...], ...]


class Metric(Protocol):
    """Scores a few documents as the knowledge base does: its best document, if among them, also ranks first here."""

    async def encode(self, text: str) -> Query:
        """Encode one text as a query. Texts are encoded one by one, so that other texts never change the result."""
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
        """The best `count` documents for each query, or all if there are fewer. A larger count only adds documents.

        Raises `KnowledgeBaseError` if the search fails, `ConfigurationError` for queries of another metric.
        """
        ...

    async def aclose(self) -> None:
        """Release every resource. Idempotent."""
        ...


async def search(base: KnowledgeBase, queries: Sequence[Query], count: int, text: str | None = None) -> SearchResult:
    """`base.search` within a span, which shows the documents that a sole query found, and `text`."""
    named = {"agentspec.retrieval.queries": len(queries), "gen_ai.retrieval.query.text": text}
    with tracing.span("retrieval", None, named) as span:
        found = await base.search(queries, count)
        if span is not None and len(found.hits) == 1:
            shown = [{"id": hit.document.id, "score": float(hit.score)} for hit in found.hits[0]]
            span.set({"gen_ai.retrieval.documents": json.dumps(shown)})
        return found


def ranked(hits: Sequence[Hit], scores: NDArray[np.float64]) -> list[Hit]:
    """`hits` by descending `scores`; ties are ordered by document id."""
    order = sorted(range(len(hits)), key=lambda i: (-scores[i], hits[i].document.id))
    return [hits[i] for i in order]


def best_rows(scores: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """The rows of the `count` highest scores, or all rows if there are fewer, highest first; ties in row order.

    An index whose rows are sorted by document id thus ranks as `ranked` does.
    """
    chosen = np.arange(len(scores))
    if count < len(scores):
        last = np.partition(scores, len(scores) - count)[len(scores) - count]
        above = np.flatnonzero(scores > last)
        chosen = np.concatenate([above, np.flatnonzero(scores == last)[: count - len(above)]])
    return chosen[np.lexsort((chosen, -scores[chosen]))]


OVERHEAD = 512  # bytes of a document without its text and features
TERM = 128  # bytes of a term with its weight


class RetrievedDocuments:
    """Cached documents by id, all of one version of one knowledge base; the least recently found are evicted.

    If the cache holds the knowledge base's best document for a query, that document also ranks first here, because both
    use the same scores (RaLMSpec, section 3.1). A wrong guess costs time and never changes an answer. A cache belongs
    to one request.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._hits: OrderedDict[str, tuple[Hit, int]] = OrderedDict()
        self.version: str | None = None
        self.nbytes = 0

    def add(self, version: str, found: Iterable[Sequence[Hit]]) -> None:
        """Add found documents, after dropping documents of any other version."""
        if version != self.version:
            self._hits.clear()
            self.version, self.nbytes = version, 0
        for hits in found:
            for hit in reversed(hits):
                _, before = self._hits.pop(hit.document.id, (None, 0))
                features, written = hit.features, len(hit.document.text) + len(hit.document.title)
                weighed = features.nbytes if hasattr(features, "nbytes") else TERM * len(features or ())
                self._hits[hit.document.id] = (hit, OVERHEAD + written + weighed)
                self.nbytes += OVERHEAD + written + weighed - before
        while self.nbytes > self._limit and self._hits:
            _, (_, nbytes) = self._hits.popitem(last=False)
            self.nbytes -= nbytes

    def best(self, query: Query, metric: Metric) -> Hit | None:
        """The best cached document for `query`; None if the cache is empty."""
        hits = [hit for hit, _ in self._hits.values()]
        return ranked(hits, metric.scores(query, hits))[0] if hits else None
