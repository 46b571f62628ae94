"""An index in memory as a knowledge base: searches run in threads and do not block the event loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import anyio

from agentspec.errors import ConfigurationError
from agentspec.reasoning.retrieval.knowledge.base import Document, Hit, Metric, Query, SearchResult


class Index(Protocol):
    """An index whose searches block. Several threads may search at once."""

    @property
    def metric(self) -> Metric: ...

    @property
    def documents(self) -> Sequence[Document]: ...

    def search(self, queries: Sequence[Query], count: int) -> list[tuple[Hit, ...]]: ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An index, and the version of its contents."""

    index: Index
    version: str


class IndexKnowledge:
    """A `KnowledgeBase` over an index. Each search first calls `refresh` for the current snapshot.

    A new snapshot must have the same metric as the old one. `aclose` calls `close` once.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        refresh: Callable[[Snapshot], Snapshot] = lambda current: current,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._snapshot, self._refresh, self._close = snapshot, refresh, close
        self._lock = threading.Lock()
        self._closed = False

    @property
    def metric(self) -> Metric:
        return self._snapshot.index.metric

    @property
    def size(self) -> int:
        """The number of documents."""
        return len(self._snapshot.index.documents)

    async def search(self, queries: Sequence[Query], count: int) -> SearchResult:
        require_count(count)
        return await anyio.to_thread.run_sync(self._search, queries, count, abandon_on_cancel=True)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            await anyio.to_thread.run_sync(self._close)

    def _search(self, queries: Sequence[Query], count: int) -> SearchResult:
        with self._lock:
            self._snapshot = current = self._refresh(self._snapshot)
        return SearchResult(current.version, tuple(current.index.search(queries, count)))


def require_count(count: int) -> None:
    """Raise `ConfigurationError` unless at least one document is asked for."""
    if count < 1:
        raise ConfigurationError(f"ask for at least one document, not {count}", param="count")
