"""What one answer with retrieval asks and tells: its searches, with a time limit and statistics, and its events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentspec.errors import KnowledgeBaseError
from agentspec.reasoning.retrieval.knowledge.base import Document, Hit, KnowledgeBase, Query, SearchResult
from agentspec.types import FinishReason, TokenLogprob

if TYPE_CHECKING:
    from agentspec.backends.torch.text.structured_output import AnswerReader

TRACED = 256  # most strides that the statistics keep
FOUND = 20  # documents that each search asks for, with and without guesses: P of RaLMSpec
SEARCH_SECONDS = 30.0  # that one search may take


@dataclass(frozen=True, slots=True)
class AnswerBegan:
    """The prompt is read. `reader` tells the thoughts and tool calls in the text that follows; None if it is plain."""

    reader: AnswerReader | None


@dataclass(frozen=True, slots=True)
class VerifiedText:
    """The text and tokens of a verified round; text that may be the start of a stop string is held back."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    document: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerEnded:
    """The answer is complete. `prompt_tokens` counts the tokens of the question, without documents."""

    finish: FinishReason
    prompt_tokens: int = 0
    stop_reason: str | None = None


Event = AnswerBegan | VerifiedText | AnswerEnded


@dataclass(slots=True)
class SearchStats:
    """Counts and times of one answer. Times are seconds of wall time, each counted once.

    `generate` is the time of kept rounds, `rolled_back` that of dropped rounds. `retrieve` and `verify` are the time of
    waiting for the knowledge base while nothing was generated; `encode` is the time of making queries.
    `guessed_tokens` were generated with guessed documents and kept; `dropped_tokens` were dropped.
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
        """Share of the verified guesses that were right; None without verified guesses."""
        return self.right / self.guesses if self.guesses else None

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each kind of work, by name."""
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
    """Encodes and sends the queries of one answer to `base`, and fills `stats`."""

    base: KnowledgeBase
    stats: SearchStats = field(default_factory=SearchStats)

    async def query(self, text: str) -> Query:
        began = time.perf_counter()
        try:
            return await self.base.metric.encode(text)
        finally:
            self.stats.encode += time.perf_counter() - began

    async def search(self, queries: Sequence[Query]) -> tuple[SearchResult, float]:
        """Search for all queries in one batch; returns the result, and the seconds it took.

        Raises `KnowledgeBaseError` if the base fails or takes too long.
        """
        began = time.perf_counter()
        try:
            async with asyncio.timeout(SEARCH_SECONDS):
                found = await self.base.search(queries, FOUND)
        except TimeoutError:
            raise KnowledgeBaseError(f"the knowledge base took more than {SEARCH_SECONDS:g} seconds") from None
        except OSError as error:
            raise KnowledgeBaseError(f"the knowledge base could not be asked: {error}") from error
        if len(found.hits) != len(queries):
            raise KnowledgeBaseError(f"the knowledge base answered {len(found.hits)} of {len(queries)} queries")
        return found, time.perf_counter() - began


def first(hits: Sequence[Hit]) -> Document | None:
    """The best document of `hits`, which may be unordered; of equal scores the smaller id. None without hits."""
    return min(hits, key=lambda hit: (-hit.score, hit.document.id)).document if hits else None


def shown(document: Document | None) -> tuple[str, str, str] | None:
    """What the model reads of a document, and its id: some retrievers find other passages under the same id."""
    return None if document is None else (document.id, document.title, document.text)


def name_of(document: Document | None) -> str | None:
    return None if document is None else document.id
