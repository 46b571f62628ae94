"""The state of one answer: its verified part, the rounds guessed ahead of it, and the running searches."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from agentspec.reasoning.retrieval.events import Event, Retrieved, RolledBack, Speculated, Verified, VerifiedText
from agentspec.reasoning.retrieval.knowledge.base import Document, Query, SearchResult
from agentspec.reasoning.retrieval.knowledge.documents import RetrievedDocuments
from agentspec.reasoning.retrieval.knowledge.search_client import SearchClient, first, name_of, shown
from agentspec.reasoning.retrieval.partial_answer import PartialAnswer
from agentspec.reasoning.retrieval.round_generator import RoundGenerator
from agentspec.reasoning.speculative_task import cancel_tasks
from agentspec.speculation.stride import MOST, SEQUENTIAL, StrideGovernor, StridePlan

MAX_SEARCHES = 4  # verification batches at once; later guesses wait for the next batch


@dataclass(slots=True, eq=False)
class Round:
    """Tokens generated with one document. `query` is set while the document is a guess, and None once it is verified.

    `version` is the knowledge base's version that the document came from; `changed`: the previous round had another
    document; `beside`: a verification ran at the same time.
    """

    before: PartialAnswer
    document: Document | None
    query: Query | None
    version: str | None
    changed: bool
    beside: bool
    began: float = field(default_factory=time.perf_counter)
    after: PartialAnswer | None = None
    seconds: float = 0.0
    sent: bool = False  # whether the query was sent for verification

    @property
    def tokens(self) -> int:
        return 0 if self.after is None else len(self.after.token_ids) - len(self.before.token_ids)


@dataclass(frozen=True, slots=True)
class VerificationBatch:
    """The running search for the queries of `rounds`; the task returns the result and the seconds it took."""

    rounds: list[Round]
    task: asyncio.Task[tuple[SearchResult, float]]


@dataclass(frozen=True, slots=True)
class TrueDocument:
    """The document that the knowledge base named for the next round."""

    document: Document | None


class SpeculationState:
    """The state of `ralmspec`. `answer` is verified; `ahead` holds the rounds after it; the last may be running.

    Leaving the block cancels generation and searches.
    """

    def __init__(
        self, generator: RoundGenerator, client: SearchClient, cache: RetrievedDocuments, governor: StrideGovernor
    ) -> None:
        self.generator, self.client, self.cache, self.governor = generator, client, cache, governor
        self.stats = client.stats
        self.answer = PartialAnswer()
        self.plan: StridePlan = SEQUENTIAL
        self.ahead: deque[Round] = deque()
        self._true_document: TrueDocument | None = None
        self._generating: asyncio.Task[PartialAnswer] | None = None
        self._searching: deque[VerificationBatch] = deque()
        self._document: str | None = None
        self._sent = 0
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
        if self._generating is None and self._true_document is None and not self.speculative_end.over:
            self.plan = self.governor.choose()

    @property
    def must_retrieve(self) -> bool:
        """Whether the next round has to wait for a search."""
        return self._true_document is None and not self.ahead and not self.plan.stride

    @property
    def may_begin(self) -> bool:
        """Whether a round may begin, with the true document or with a guess."""
        if self._generating is not None or len(self.ahead) >= MOST or self.speculative_end.over:
            return False
        if self._true_document is not None or self.plan.asynchronous:
            return True
        return not self._searching and len(self._unsent()) < self.plan.stride

    async def retrieve(self) -> Retrieved:
        """Search for the next document and wait for it. Also records whether the cache would have guessed it."""
        query = await self.client.query(await self.generator.query(self.answer))
        guess = self.cache.best(query, self.client.base.metric)
        found, seconds = await self._search([query])
        self.governor.measured.retrieved(seconds, alone=True)
        self.stats.count_search(1, 0)
        self.stats.retrieve += seconds
        self._true_document = TrueDocument(first(found.hits[0]))
        if guess is not None:
            right = guess.document.id == name_of(self._true_document.document) and found.version == self.cache.version
            self.governor.verified(int(right), wrong=not right)
            self.stats.count_guesses(int(right), wrong=not right)
        self.cache.add(found.version, found.hits)
        return Retrieved(name_of(self._true_document.document), seconds)

    async def begin(self) -> Speculated | None:
        """Begin a round with the true document if it is known, else with the best document in the cache."""
        end, truth, self._true_document = self.speculative_end, self._true_document, None
        query = None
        if truth is None:
            query = await self.client.query(await self.generator.query(end))
            hit = self.cache.best(query, self.client.base.metric)
            truth = TrueDocument(None if hit is None else hit.document)
        named = name_of(truth.document)
        changed = named != (name_of(self.ahead[-1].document) if self.ahead else self._document)
        self.ahead.append(Round(end, truth.document, query, self.cache.version, changed, bool(self._searching)))
        self._generating = asyncio.create_task(self.generator.generate(end, truth.document))
        return None if query is None else Speculated(named, len(end.token_ids))

    def send(self) -> None:
        """Send all unsent guesses for verification in one batch, once there are as many as the stride.

        With asynchronous verification this happens when the last of their rounds begins, otherwise when it ends.
        """
        unsent, idle = self._unsent(), self._generating is None
        if not unsent or len(self._searching) >= (MAX_SEARCHES if self.plan.asynchronous else 1):
            return
        ends = idle and (not self.plan.stride or len(self.ahead) >= MOST or self.speculative_end.over)
        if ends or (len(unsent) >= self.plan.stride and (idle or self.plan.asynchronous)):
            self._send(unsent)

    def _send(self, rounds: list[Round]) -> None:
        for round in rounds:
            round.sent = True
        self.ahead[-1].beside = True
        queries = [round.query for round in rounds if round.query is not None]
        task = asyncio.create_task(self._search(queries))
        self._searching.append(VerificationBatch(rounds, task))
        self.stats.count_search(len(rounds), len(rounds))

    async def advance(self) -> None:
        """Wait until a round is generated or the oldest batch is answered."""
        began = time.perf_counter()
        await asyncio.wait(self._tasks(searches=1), return_when=asyncio.FIRST_COMPLETED)
        if self._generating is None:
            self.stats.verify += time.perf_counter() - began

    async def collect(self) -> list[Event]:
        """Take finished results, verify rounds or roll them back, and return the events."""
        self._take_round()
        events: list[Event] = []
        while self._searching and self._searching[0].task.done():
            events += await self._compare(self._searching.popleft())
        return [*events, *self._commit()]

    def _take_round(self) -> None:
        """Store the running round's result if it has finished. Raises what its backend raised."""
        if self._generating is None or not self._generating.done():
            return
        task, self._generating = self._generating, None
        round = self.ahead[-1]
        round.after, round.seconds = task.result(), time.perf_counter() - round.began
        self.governor.measured.generated(round.seconds, changed=round.changed, alone=not round.beside)

    async def _compare(self, batch: VerificationBatch) -> list[Event]:
        """Compare guesses with found documents; roll back the first wrong one (RaLMSpec, algorithm 1, line 9)."""
        found, seconds = batch.task.result()
        self.governor.measured.retrieved(seconds, alone=False)
        truths = [first(hits) for hits in found.hits]
        same = [
            shown(round.document) == shown(truth) and round.version == found.version
            for round, truth in zip(batch.rounds, truths, strict=True)
        ]
        right = same.index(False) if False in same else len(same)
        changed = any(round.version != found.version for round in batch.rounds)
        self.stats.redone += changed
        self.cache.add(found.version, found.hits)
        self.governor.verified(right, wrong=right < len(same))
        self.stats.count_guesses(right, wrong=right < len(same))
        for round in batch.rounds[:right]:
            round.query = None
        events: list[Event] = [Verified(len(same), right, seconds, changed)]
        if right < len(same):
            events.append(await self._roll_back(batch.rounds[right], truths[right]))
        return events

    async def _roll_back(self, wrong: Round, truth: Document | None) -> RolledBack:
        """Drop the round `wrong` and all later rounds; the next round uses `truth`."""
        dropped = list(self.ahead)[self.ahead.index(wrong) :]
        for _ in dropped:
            self.ahead.pop()
        await cancel_tasks(*self._tasks())
        self._generating = None
        self._searching.clear()
        if dropped[-1].after is None:
            dropped[-1].seconds = time.perf_counter() - dropped[-1].began
        tokens = sum(round.tokens for round in dropped)
        self.stats.rolled_back += sum(round.seconds for round in dropped)
        self.stats.dropped_rounds += len(dropped)
        self.stats.dropped_tokens += tokens
        self._true_document = TrueDocument(truth)
        return RolledBack(len(wrong.before.token_ids), name_of(truth), len(dropped), tokens)

    def _commit(self) -> Iterator[Event]:
        """Move finished and verified rounds from the front of `ahead` into the answer."""
        while self.ahead and self.ahead[0].query is None and self.ahead[0].after is not None:
            round = self.ahead.popleft()
            assert round.after is not None
            before, self.answer, self._document = round.before, round.after, name_of(round.document)
            self.stats.rounds += 1
            self.stats.generate += round.seconds
            self.stats.guessed_tokens += round.tokens if round.sent else 0
            self._observe_time(round)
            text = self.answer.certain(self.generator.stops)
            fresh = self.answer.token_ids[len(before.token_ids) :], self.answer.logprobs[len(before.logprobs) :]
            yield VerifiedText(text[self._sent :], *fresh, name_of(round.document))
            self._sent = len(text)

    def _observe_time(self, round: Round) -> None:
        """Tell the governor how long a kept round took, without the time for queries, which are needed in any case."""
        (began, encoded), now = self._kept_at, (time.perf_counter(), self.stats.encode)
        self._kept_at = now
        if self.plan.stride:
            self.governor.measured.kept(round.changed, now[0] - began - (now[1] - encoded))

    def _tasks(self, searches: int = MAX_SEARCHES) -> list[asyncio.Task[Any]]:
        """The running tasks: the round, and the oldest `searches` batches."""
        tasks: list[asyncio.Task[Any]] = [batch.task for batch in self._searching]
        return [*([self._generating] if self._generating else []), *tasks[:searches]]

    def _unsent(self) -> list[Round]:
        return [round for round in self.ahead if round.query is not None and not round.sent]

    async def _search(self, queries: list[Query]) -> tuple[SearchResult, float]:
        began = time.perf_counter()
        found = await self.client.search(queries, self.generator.settings.prefetch)
        return found, time.perf_counter() - began
