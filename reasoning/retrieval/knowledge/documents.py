"""The cache that documents are guessed from: documents that searches returned, ranked by the base's own metric."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from agentspec.reasoning.retrieval.knowledge.base import Hit, Metric, Query, ranked

OVERHEAD = 512  # bytes of a document without its text and features


class RetrievedDocuments:
    """Cached documents by id, all of one version of one knowledge base; the least recently found are evicted.

    If the cache holds the knowledge base's best document for a query, that document also ranks first here, because both
    use the same scores (RaLMSpec, section 3.1). A wrong guess costs time and never changes an answer. A cache belongs
    to one request unless its owner shares it between several.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._hits: OrderedDict[str, tuple[Hit, int]] = OrderedDict()
        self.version: str | None = None
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._hits)

    def add(self, version: str, found: Iterable[Sequence[Hit]]) -> None:
        """Add found documents, after dropping documents of any other version."""
        if version != self.version:
            self.clear()
            self.version = version
        for hits in found:
            for hit in reversed(hits):
                self._add(hit)
        while self.nbytes > self._limit and self._hits:
            _, (_, nbytes) = self._hits.popitem(last=False)
            self.nbytes -= nbytes

    def best(self, query: Query, metric: Metric) -> Hit | None:
        """The best cached document for `query`; None if the cache is empty."""
        return next(iter(self.ranking(query, metric)), None)

    def ranking(self, query: Query, metric: Metric) -> list[Hit]:
        """All cached documents, the best for `query` first."""
        hits = [hit for hit, _ in self._hits.values()]
        return ranked(hits, metric.scores(query, hits)) if hits else []

    def clear(self) -> None:
        self._hits.clear()
        self.version, self.nbytes = None, 0

    def _add(self, hit: Hit) -> None:
        _, before = self._hits.pop(hit.document.id, (None, 0))
        nbytes = OVERHEAD + len(hit.document.text) + len(hit.document.title) + _bytes(hit.features)
        self._hits[hit.document.id] = (hit, nbytes)
        self.nbytes += nbytes - before


def _bytes(features: Any) -> int:
    """Bytes of a document's features: those of an array, or the sum over the items of a mapping or sequence."""
    if features is None:
        return 0
    if (nbytes := getattr(features, "nbytes", None)) is not None:
        return int(nbytes)
    if isinstance(features, dict):
        return sum(_bytes(key) + _bytes(value) for key, value in features.items())
    if isinstance(features, (list, tuple)):
        return sum(_bytes(item) for item in features)
    return sys.getsizeof(features)
