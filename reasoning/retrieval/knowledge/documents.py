"""The documents that speculation draws on: what the knowledge base has returned, ranked by its own metric."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from agentspec.reasoning.retrieval.knowledge.base import Hit, Metric, Query, ranked

OVERHEAD = 512  # bytes of a document beside its text and its features


class RetrievedDocuments:
    """Documents by id, all of one version of one knowledge base; those not found for the longest time are evicted.

    If the knowledge base's best document for a query is here, it is the best one here: scores are the knowledge base's
    own (RaLMSpec, section 3.1). A wrong guess costs time and never changes an answer. One request's alone, unless
    its owner gives it to several.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._hits: OrderedDict[str, tuple[Hit, int]] = OrderedDict()
        self.version: str | None = None
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._hits)

    def add(self, version: str, found: Iterable[Sequence[Hit]]) -> None:
        """Add what a search found; documents of another version are dropped."""
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
        """The best document here; None without any."""
        hits = [hit for hit, _ in self._hits.values()]
        return ranked(hits, metric.scores(query, hits))[0] if hits else None

    def clear(self) -> None:
        self._hits.clear()
        self.version, self.nbytes = None, 0

    def _add(self, hit: Hit) -> None:
        _, before = self._hits.pop(hit.document.id, (None, 0))
        nbytes = OVERHEAD + len(hit.document.text) + len(hit.document.title) + _bytes(hit.features)
        self._hits[hit.document.id] = (hit, nbytes)
        self.nbytes += nbytes - before


def _bytes(features: Any) -> int:
    """Memory of a document's features: an array's own, or that of a mapping's or sequence's items."""
    if features is None:
        return 0
    if (nbytes := getattr(features, "nbytes", None)) is not None:
        return int(nbytes)
    if isinstance(features, dict):
        return sum(_bytes(key) + _bytes(value) for key, value in features.items())
    if isinstance(features, (list, tuple)):
        return sum(_bytes(item) for item in features)
    return sys.getsizeof(features)
