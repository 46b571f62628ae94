"""Iterative retrieval: `sequential` defines the answer, and `ralmspec` gives the same answer sooner.

Every `ROUND_TOKENS` tokens the last `QUERY_TOKENS` tokens of question and answer form a query, and the best document
for it is put into the prompt of the next round (RaLM with RaLMSpec; Zhang et al. 2024, arXiv 2401.14021). Verification
is asynchronous: a batch is sent as soon as its last query is known, and generation continues meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentspec.backends.base import Backend
from agentspec.errors import KnowledgeBaseError
from agentspec.reasoning.retrieval.knowledge.base import (
    Document,
    Hit,
    KnowledgeBase,
    Query,
    RetrievedDocuments,
    SearchResult,
    search,
)
from agentspec.reasoning.retrieval.rounds import AnswerWriter, PartialAnswer, RoundGenerator
from agentspec.reasoning.tasks import cancel_tasks
from agentspec.speculation.stride import MOST, StrideGovernor, StrideMeasurements
from agentspec.types import Delta, GenerateRequest

DOCUMENT_TOKENS = 256  # most of a document that the model reads
CACHE_BYTES = 4 << 20  # of the documents that are kept for one request
MAX_SEARCHES = 4  # verification batches at once; later guesses wait for the next batch
TRACED = 256  # most strides that the statistics keep
FOUND = 20  # documents that each search asks for, with and without guesses: P of RaLMSpec
SEARCH_SECONDS = 30.0  # that one search may take
PARTS = ("generate", "rolled_back", "retrieve", "verify", "encode")  # of the time of an answer


@dataclass(slots=True)
class SearchStats:
    """Counts and times of one answer. Times are seconds of wall time, each counted once.

    Of the `seconds`, "generate" is the time of kept rounds, "rolled_back" that of dropped rounds. "retrieve" and
    "verify" are the time of waiting for searches while nothing was generated; "encode" that of making queries.
    `guessed_tokens` were generated with guessed documents and kept; `dropped_tokens` were dropped.
    """

    rounds: int = 0
    guessed_tokens: int = 0
    dropped_tokens: int = 0
    guesses: int = 0
    right: int = 0
    queries: int = 0
    batches: int = 0
    redone: int = 0
    strides: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @property
    def hit_rate(self) -> float | None:
        """Share of the verified guesses that were right; None without verified guesses."""
        return self.right / self.guesses if self.guesses else None

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
        query = await self.base.metric.encode(text)
        self.stats.seconds["encode"] += time.perf_counter() - began
        return query

    async def search(self, queries: Sequence[Query]) -> tuple[SearchResult, float]:
        """Search for all queries in one batch; returns the result, and the seconds it took.

        Raises `KnowledgeBaseError` if the base fails or takes too long.
        """
        began = time.perf_counter()
        try:
            async with asyncio.timeout(SEARCH_SECONDS):
                found = await search(self.base, queries, FOUND)
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


async def sequential(
    request: GenerateRequest,
    *,
    backend: Backend,
    knowledge: KnowledgeBase,
    document_tokens: int = DOCUMENT_TOKENS,
    stats: SearchStats | None = None,
) -> AsyncGenerator[Delta]:
    """Search, then generate a round, until the answer ends. This defines the answer. Raises as `ralmspec` does.

    A search asks for as many documents as speculation does: the best one of an approximate service may depend on it.
    """
    stats = stats or SearchStats()
    generator = await RoundGenerator.open(request, backend, document_tokens)
    client, writer, answer = SearchClient(knowledge, stats), AnswerWriter(generator), await generator.begin()
    while not answer.over:
        query = await client.query(await generator.query(answer))
        found, seconds = await client.search([query])
        began = time.perf_counter()
        stats.count_search(1, 0)
        stats.seconds["retrieve"] += seconds
        answer = await generator.generate(answer, first(found.hits[0]))
        stats.rounds += 1
        stats.seconds["generate"] += time.perf_counter() - began
        yield writer.verified(answer)
    yield await writer.ended(answer)


async def ralmspec(
    request: GenerateRequest,
    *,
    backend: Backend,
    knowledge: KnowledgeBase,
    document_tokens: int = DOCUMENT_TOKENS,
    stride: int | None = None,
    stats: SearchStats | None = None,
    measured: StrideMeasurements | None = None,
) -> AsyncGenerator[Delta]:
    """Guess documents, verify them in batches and roll back wrong rounds, until the answer ends.

    Every delta is a verified round. The model reads up to `document_tokens` of a document. `stride` documents are
    guessed before a verification; without it, measured times decide whether to guess. The call fills `stats`.
    `measured` holds the times of earlier answers of the same model and knowledge base. Closing the iterator cancels
    generation and searches.

    Raises `KnowledgeBaseError` if a search fails, since the answer cannot continue without its document. Raises
    `InvalidRequestError` for request fields that rounds cannot honour, and what the backend raises.
    """
    stats = stats or SearchStats()
    generator = await RoundGenerator.open(request, backend, document_tokens)
    client, writer = SearchClient(knowledge, stats), AnswerWriter(generator)
    governor = StrideGovernor(measured or StrideMeasurements(), stride)
    async with SpeculationState(generator, client, governor) as state:
        await state.retrieve()
        while not state.answer.over:
            state.choose_stride()
            if state.must_retrieve:
                await state.retrieve()
            if state.may_begin:
                await state.begin()
            state.send()
            await state.advance()
            await state.collect()
            while state.commit():
                yield writer.verified(state.answer)
        yield await writer.ended(state.answer)


@dataclass(slots=True, eq=False)
class Round:
    """Tokens generated with one document. `query` is set while the document is a guess, and None once it is verified.

    `version` is the knowledge base's version that the document came from; `changed`: the previous round had another
    document; `shared`: a verification ran at the same time.
    """

    before: PartialAnswer
    document: Document | None
    query: Query | None
    version: str | None
    changed: bool
    shared: bool
    began: float = field(default_factory=time.perf_counter)
    after: PartialAnswer | None = None
    seconds: float = 0.0
    sent: bool = False  # whether the query was sent for verification

    @property
    def tokens(self) -> int:
        return 0 if self.after is None else len(self.after.token_ids) - len(self.before.token_ids)


VerificationBatch = tuple[list[Round], asyncio.Task[tuple[SearchResult, float]]]
"""The running search for the queries of these rounds; the task returns the result and the seconds it took."""


class SpeculationState:
    """The state of `ralmspec`. `answer` is verified; `ahead` holds the rounds after it; the last may be running.

    Leaving the block cancels generation and searches.
    """

    def __init__(self, generator: RoundGenerator, client: SearchClient, governor: StrideGovernor) -> None:
        self.generator, self.client, self.governor = generator, client, governor
        self.stats, self.cache = client.stats, RetrievedDocuments(CACHE_BYTES)
        self.answer = PartialAnswer()
        self.stride = 0
        self.ahead: deque[Round] = deque()
        self._truth: tuple[Document | None] | None = None  # the true document of the next round, once it is known
        self._generating: asyncio.Task[PartialAnswer] | None = None
        self._searching: deque[VerificationBatch] = deque()
        self._document: Document | None = None  # of the last round of `answer`
        self._kept_at = (time.perf_counter(), 0.0)

    async def __aenter__(self) -> SpeculationState:
        self.answer = await self.generator.begin()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await cancel_tasks(*self._tasks())

    @property
    def speculative_end(self) -> PartialAnswer:
        """The answer with all guessed rounds. Must not be read while a round is running."""
        last = self.ahead[-1].after if self.ahead else self.answer
        assert last is not None, "a round is under way"
        return last

    def choose_stride(self) -> None:
        """Choose how many documents to guess, whenever a new round could begin."""
        if self._generating is None and self._truth is None and not self.speculative_end.over:
            self.stride = self.governor.choose()

    @property
    def must_retrieve(self) -> bool:
        """Whether the next round has to wait for a search."""
        return self._truth is None and not self.ahead and not self.stride

    @property
    def may_begin(self) -> bool:
        """Whether a round may begin, with the true document or with a guess."""
        if self._generating is not None or len(self.ahead) >= MOST or self.speculative_end.over:
            return False
        return self._truth is not None or self.stride > 0

    async def retrieve(self) -> None:
        """Search for the next document and wait for it. Also records whether the cache would have guessed it."""
        query = await self.client.query(await self.generator.query(self.answer))
        guess = self.cache.best(query, self.client.base.metric)
        found, seconds = await self.client.search([query])
        self.governor.measured.retrieved(seconds, alone=True)
        self.stats.count_search(1, 0)
        self.stats.seconds["retrieve"] += seconds
        truth = first(found.hits[0])
        self._truth = (truth,)
        if guess is not None:
            right = guess.document == truth and found.version == self.cache.version
            self.governor.verified(int(right), wrong=not right)
            self.stats.count_guesses(int(right), wrong=not right)
        self.cache.add(found.version, found.hits)

    async def begin(self) -> None:
        """Begin a round with the true document if it is known, else with the best document in the cache."""
        end, query, truth, self._truth = self.speculative_end, None, self._truth, None
        if truth is None:
            query = await self.client.query(await self.generator.query(end))
            hit = self.cache.best(query, self.client.base.metric)
            truth = (None if hit is None else hit.document,)
        (document,) = truth
        before = self.ahead[-1].document if self.ahead else self._document
        changed = document != before
        self.ahead.append(Round(end, document, query, self.cache.version, changed, bool(self._searching)))
        self._generating = asyncio.create_task(self.generator.generate(end, document))

    def send(self) -> None:
        """Send all unsent guesses for verification in one batch, once the last of as many as the stride has begun."""
        rounds = [round for round in self.ahead if round.query is not None and not round.sent]
        if not rounds or len(self._searching) >= MAX_SEARCHES:
            return
        ends = self._generating is None and (len(self.ahead) >= MOST or self.speculative_end.over)
        if len(rounds) < self.stride and not ends:
            return
        for round in rounds:
            round.sent = True
        self.ahead[-1].shared = True
        queries = [round.query for round in rounds if round.query is not None]
        task = asyncio.create_task(self.client.search(queries))
        self._searching.append((rounds, task))
        self.stats.count_search(len(rounds), len(rounds))

    async def advance(self) -> None:
        """Wait until a round is generated or the oldest batch is answered."""
        began = time.perf_counter()
        await asyncio.wait(self._tasks(searches=1), return_when=asyncio.FIRST_COMPLETED)
        if self._generating is None:
            self.stats.seconds["verify"] += time.perf_counter() - began

    async def collect(self) -> None:
        """Take finished results, and verify rounds or roll them back."""
        self._take_round()
        while self._searching and self._searching[0][1].done():
            await self._compare(*self._searching.popleft())

    def _take_round(self) -> None:
        """Store the running round's result if it has finished. Raises what its backend raised."""
        if self._generating is None or not self._generating.done():
            return
        task, self._generating = self._generating, None
        round = self.ahead[-1]
        round.after, round.seconds = task.result(), time.perf_counter() - round.began
        self.governor.measured.generated(round.seconds, changed=round.changed, alone=not round.shared)

    async def _compare(self, rounds: list[Round], task: asyncio.Task[tuple[SearchResult, float]]) -> None:
        """Compare guesses with found documents; roll back the first wrong one (RaLMSpec, algorithm 1, line 9)."""
        found, seconds = task.result()
        self.governor.measured.retrieved(seconds, alone=False)
        truths = [first(hits) for hits in found.hits]
        same = [
            round.document == truth and round.version == found.version
            for round, truth in zip(rounds, truths, strict=True)
        ]
        right = same.index(False) if False in same else len(same)
        self.stats.redone += any(round.version != found.version for round in rounds)
        self.cache.add(found.version, found.hits)
        self.governor.verified(right, wrong=right < len(same))
        self.stats.count_guesses(right, wrong=right < len(same))
        for round in rounds[:right]:
            round.query = None
        if right < len(same):
            await self._roll_back(rounds[right], truths[right])

    async def _roll_back(self, wrong: Round, truth: Document | None) -> None:
        """Drop the round `wrong` and all later rounds; the next round uses `truth`."""
        dropped = list(self.ahead)[self.ahead.index(wrong) :]
        for _ in dropped:
            self.ahead.pop()
        await cancel_tasks(*self._tasks())
        self._generating = None
        self._searching.clear()
        if dropped[-1].after is None:
            dropped[-1].seconds = time.perf_counter() - dropped[-1].began
        self.stats.seconds["rolled_back"] += sum(round.seconds for round in dropped)
        self.stats.dropped_tokens += sum(round.tokens for round in dropped)
        self._truth = (truth,)

    def commit(self) -> bool:
        """Move a finished and verified round from the front of `ahead` into the answer; False if there is none."""
        if not self.ahead or self.ahead[0].query is not None or self.ahead[0].after is None:
            return False
        round = self.ahead.popleft()
        self.answer, self._document = round.after or self.answer, round.document
        self.stats.rounds += 1
        self.stats.seconds["generate"] += round.seconds
        self.stats.guessed_tokens += round.tokens if round.sent else 0
        self._observe_time(round)
        return True

    def _observe_time(self, round: Round) -> None:
        """Record how long a verified round took, without the time for queries, which are needed in any case."""
        (began, encoded), now = self._kept_at, (time.perf_counter(), self.stats.seconds["encode"])
        self._kept_at = now
        if self.stride:
            self.governor.measured.kept(round.changed, now[0] - began - (now[1] - encoded))

    def _tasks(self, searches: int = MAX_SEARCHES) -> list[asyncio.Task[Any]]:
        """The running tasks: the round, and the oldest `searches` batches."""
        tasks: list[asyncio.Task[Any]] = [task for _, task in self._searching]
        return [*([self._generating] if self._generating else []), *tasks[:searches]]
