"""A knowledge base as one answer uses it: every search within a time limit and counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentspec.errors import KnowledgeBaseError
from agentspec.reasoning.retrieval.knowledge.base import Document, Hit, KnowledgeBase, Query, SearchResult

TRACED = 256  # strides that a trace keeps


@dataclass(slots=True)
class SearchStats:
    """What one answer took. Seconds are those that passed, each counted once.

    `generate` and `rolled_back` are those of the rounds that stayed and that did not; `retrieve` and `verify` those of
    waiting for the knowledge base with nothing to generate meanwhile; `encode` those of making queries.
    `guessed_tokens` and `dropped_tokens` come from guessed documents, of rounds that stayed and that did not.
    """

    rounds: int = 0
    guessed_tokens: int = 0
    dropped_rounds: int = 0
    dropped_tokens: int = 0
    guesses: int = 0
    right: int = 0
    queries: int = 0
    batches: int = 0
    redone: int = 0
    strides: list[int] = field(default_factory=list)
    generate: float = 0.0
    rolled_back: float = 0.0
    retrieve: float = 0.0
    verify: float = 0.0
    encode: float = 0.0

    @property
    def hit_rate(self) -> float | None:
        """Share of the guesses that were judged and right; None without any."""
        return self.right / self.guesses if self.guesses else None

    @property
    def seconds(self) -> dict[str, float]:
        """Where the time went."""
        names = ("generate", "rolled_back", "retrieve", "verify", "encode")
        return {name: round(getattr(self, name), 6) for name in names}

    def count_search(self, queries: int, stride: int) -> None:
        self.queries += queries
        self.batches += 1
        if len(self.strides) < TRACED:
            self.strides.append(stride)

    def count_guesses(self, right: int, *, wrong: bool) -> None:
        self.right += right
        self.guesses += right + wrong


@dataclass(slots=True)
class SearchClient:
    """Asks `base`, for one answer."""

    base: KnowledgeBase
    timeout: float
    stats: SearchStats = field(default_factory=SearchStats)

    async def query(self, text: str) -> Query:
        began = time.perf_counter()
        try:
            return await self.base.metric.encode(text)
        finally:
            self.stats.encode += time.perf_counter() - began

    async def search(self, queries: Sequence[Query], count: int) -> SearchResult:
        """The answers to all queries, in one batch. Raises `KnowledgeBaseError` for a base that fails in any way."""
        try:
            async with asyncio.timeout(self.timeout):
                found = await self.base.search(queries, count)
        except TimeoutError:
            raise KnowledgeBaseError(f"the knowledge base took more than {self.timeout:g} seconds") from None
        except OSError as error:
            raise KnowledgeBaseError(f"the knowledge base could not be asked: {error}") from error
        if len(found.hits) != len(queries):
            raise KnowledgeBaseError(f"the knowledge base answered {len(found.hits)} of {len(queries)} queries")
        return found


def first(hits: Sequence[Hit]) -> Document | None:
    """The best document of an answer, in whatever order the answer is; of equal ones that with the smaller id."""
    return min(hits, key=lambda hit: (-hit.score, hit.document.id)).document if hits else None


def name_of(document: Document | None) -> str | None:
    return None if document is None else document.id
