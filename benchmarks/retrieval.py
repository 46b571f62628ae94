"""Speculative retrieval against sequential retrieval, on one model: wall time, answers compared, bounds beside figures.

Every question is answered by all variants of a case one after another, in an order that rotates from question to
question. Each run is a tenant of its own, so that none finds key/value rows which another has left; token drafting is
off, so that what is measured is retrieval.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from agentspec.backends.settings import TorchSettings
from agentspec.benchmarks.retrieval_bases import KINDS, Bases, Question
from agentspec.benchmarks.stats import Ratio, paired_ratio, rotated
from agentspec.reasoning.retrieval.events import VerifiedText
from agentspec.reasoning.retrieval.knowledge.base import KnowledgeBase
from agentspec.reasoning.retrieval.knowledge.search_client import SearchStats
from agentspec.reasoning.retrieval.ralmspec import ralmspec, sequential
from agentspec.reasoning.retrieval.settings import RetrievalSettings
from agentspec.speculation.stride import RequestStride
from agentspec.types import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from agentspec.backends.torch import TorchBackend

SEQUENTIAL, SPECULATIVE, WAITING = "sequential", "speculative", "speculative, waiting"
SAMPLED = 0.8
CHECKED: tuple[int | Literal["os3"], ...] = (3, "os3")
SAVED_TOKENS = 96  # batches are saved in long answers: an answer's first query is one of its own, and its last few too
SWEPT = (0.001, 0.01, 0.1, 0.3, 1.0)
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Run:
    """One answer: its token ids, seconds of wall time, and where those went."""

    tokens: tuple[int, ...]
    seconds: float
    account: SearchStats


@dataclass(frozen=True, slots=True)
class Goal:
    """What the ratio of two variants' seconds must reach, and what it should."""

    required: float
    aim: float | None = None  # None: nine tenths of the bound
    variant: str = SPECULATIVE
    baseline: str = SEQUENTIAL


@dataclass(slots=True)
class Case:
    """A knowledge base and the runs over it, question by question, of each variant."""

    name: str
    goals: tuple[Goal, ...]
    delay: float = 0.0
    runs: dict[str, list[Run]] = field(default_factory=dict)

    def ratio(self, goal: Goal) -> Ratio:
        """How many times faster the variant is."""
        baseline, variant = (self._seconds(name) for name in (goal.baseline, goal.variant))
        return paired_ratio(baseline, variant)

    def speedup(self, variant: str = SPECULATIVE) -> float:
        """Of all questions together."""
        return sum(self._seconds(SEQUENTIAL)) / sum(self._seconds(variant))

    def same(self, variant: str) -> int:
        """Answers equal to sequential retrieval's, token for token."""
        pairs = zip(self.runs[variant], self.runs[SEQUENTIAL], strict=True)
        return sum(left.tokens == right.tokens for left, right in pairs)

    def gamma(self, variant: str = SPECULATIVE) -> float:
        """Share of the guesses that were right: the accuracy of the cache."""
        accounts = [run.account for run in self.runs[variant]]
        guesses = sum(account.guesses for account in accounts)
        return sum(account.right for account in accounts) / guesses if guesses else 0.0

    def costs(self) -> tuple[float, float, float]:
        """Mean seconds of a round by sequential retrieval: generating, searching, making the query."""
        accounts = [run.account for run in self.runs[SEQUENTIAL]]
        rounds = sum(account.rounds for account in accounts)
        parts = ("generate", "retrieve", "encode")
        generate, retrieve, encode = (sum(getattr(account, part) for account in accounts) / rounds for part in parts)
        return generate, retrieve, encode

    def bound(self) -> float:
        """What free verification would give: of a right guess only its round is left, of a wrong one nothing saved.

        The first document of an answer is always waited for.
        """
        (generate, retrieve, encode), gamma = self.costs(), self.gamma()
        rounds = sum(run.account.rounds for run in self.runs[SEQUENTIAL]) / len(self.runs[SEQUENTIAL])
        waits = 1 + (1 - gamma) * (rounds - 1)
        return rounds * (generate + encode + retrieve) / (rounds * (generate + encode) + waits * retrieve)

    def shares(self, variant: str) -> dict[str, float]:
        """Where the seconds went, as shares of all."""
        total = sum(self._seconds(variant))
        parts = self.runs[variant][0].account.seconds
        return {part: sum(run.account.seconds[part] for run in self.runs[variant]) / total for part in parts}

    def _seconds(self, variant: str) -> list[float]:
        return [run.seconds for run in self.runs[variant]]


@dataclass(frozen=True, slots=True)
class Point:
    """Mean speed-up at a delay of the knowledge base, measured, and by what the costs and the hit rate imply."""

    delay: float
    speedup: float
    bound: float
    generate: float
    retrieve: float
    gamma: float


@dataclass(slots=True)
class Report:
    """Everything that was measured. `saved` is 1 - batches / queries at a fixed stride of 3, synchronously."""

    cases: list[Case] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    saved: float = 0.0
    saved_gamma: float = 0.0
    round_seconds: float = 0.0


@dataclass(slots=True)
class Bench:
    """One loaded model that answers questions over one knowledge base or another."""

    backend: TorchBackend
    max_tokens: int
    progress: Progress
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    runs: Iterator[int] = field(default_factory=count)

    @classmethod
    def load(cls, model: str, max_tokens: int, progress: Progress) -> Bench:
        from agentspec.backends.torch import TorchBackend

        progress(f"loading {model}")
        return cls(TorchBackend.load(TorchSettings(model=model, max_draft_tokens=0)), max_tokens, progress)

    def close(self) -> None:
        self.loop.run_until_complete(self.backend.aclose())
        self.loop.close()

    def measure(self, case: Case, base: KnowledgeBase, questions: Sequence[Question], variants: Sequence[str]) -> Case:
        """Answer every question by every variant. What speculation learns of costs it keeps from one to the next."""
        paces = {variant: RequestStride() for variant in variants}
        self.answer(
            questions[0], base, variants[0], RequestStride()
        )  # what a first search sets up is no part of the figures
        for index, question in enumerate(questions):
            self.progress(f"{case.name}: question {index + 1} of {len(questions)}")
            for variant, pace in rotated(paces, index):
                case.runs.setdefault(variant, []).append(self.answer(question, base, variant, pace))
        return case

    def answer(
        self,
        question: Question,
        base: KnowledgeBase,
        variant: str,
        pace: RequestStride,
        settings: RetrievalSettings | None = None,
        seed: int | None = None,
    ) -> Run:
        settings = settings or RetrievalSettings(asynchronous=variant != WAITING)
        return self.loop.run_until_complete(self._answer(question, base, variant, pace, settings, seed))

    async def _answer(
        self,
        question: Question,
        base: KnowledgeBase,
        variant: str,
        pace: RequestStride,
        settings: RetrievalSettings,
        seed: int | None,
    ) -> Run:
        temperature = 0.0 if seed is None else SAMPLED
        request = GenerateRequest(
            self.backend.model_name,
            messages=[{"role": "user", "content": question.text}],
            sampling=SamplingParams(temperature=temperature, seed=seed, max_tokens=self.max_tokens),
            tenant=f"run-{next(self.runs)}",
        )
        account, began = SearchStats(), time.perf_counter()
        tokens: list[int] = []
        given: dict[str, Any] = {"backend": self.backend, "knowledge": base, "settings": settings, "stats": account}
        events = sequential(request, **given) if variant == SEQUENTIAL else ralmspec(request, **given, pace=pace)
        async for event in events:
            if isinstance(event, VerifiedText):
                tokens += event.token_ids
        return Run(tuple(tokens), time.perf_counter() - began, account)


def run_retrieval(bench: Bench, bases: Bases, questions: Sequence[Question], *, synthetic: int, sweep: int) -> Report:
    """All cases: `synthetic` vectors in an exact index (0: left out), `sweep` questions at each delay (0: no sweep)."""
    report = Report()
    for kind in ("hnsw", "bm25"):
        with bases.local(kind) as base:
            case = Case(f"{kind} over the corpus", (Goal(0.98, 1.05),))
            report.cases.append(bench.measure(case, base, questions, (SEQUENTIAL, SPECULATIVE)))
    generate, _, encode = report.cases[0].costs()
    report.round_seconds = generate + encode
    with bases.local("dense") as base:
        report.saved, report.saved_gamma = batches_saved(bench, base, questions)
    if synthetic:
        with bases.synthetic(synthetic) as base:
            case = Case(f"exact dense, {synthetic:,} x {bases.dimensions}", (Goal(0.98, 1.1),))
            report.cases.append(bench.measure(case, base, questions, (SEQUENTIAL, SPECULATIVE)))
    with bases.remote() as remote:
        for times, goals, variants in (
            (4, (Goal(1.5), Goal(1.1, 1.3, SPECULATIVE, WAITING)), (SEQUENTIAL, SPECULATIVE, WAITING)),
            (1, (Goal(1.1),), (SEQUENTIAL, SPECULATIVE)),
        ):
            remote.delay = times * report.round_seconds
            case = Case(f"remote, a delay of {times} rounds", goals, remote.delay)
            report.cases.append(bench.measure(case, remote, questions, variants))
        for delay in SWEPT if sweep else ():
            remote.delay = delay
            case = Case(f"remote, {1000 * delay:g} ms", (), delay)
            bench.measure(case, remote, questions[:sweep], (SEQUENTIAL, SPECULATIVE))
            report.points.append(_point(case))
    return report


def _point(case: Case) -> Point:
    generate, retrieve, encode = case.costs()
    return Point(case.delay, case.speedup(), case.bound(), generate + encode, retrieve, case.gamma())


def batches_saved(bench: Bench, base: KnowledgeBase, questions: Sequence[Question]) -> tuple[float, float]:
    """1 - batches / queries at a fixed stride of 3, where verification is waited for; and the hit rate meanwhile."""
    settings = RetrievalSettings(stride=3, asynchronous=False)
    longer, accounts = replace(bench, max_tokens=SAVED_TOKENS), []
    for index, question in enumerate(questions):
        bench.progress(f"fixed stride: question {index + 1} of {len(questions)}")
        accounts.append(longer.answer(question, base, SPECULATIVE, RequestStride(), settings).account)
    batches, queries = sum(a.batches for a in accounts), sum(a.queries for a in accounts)
    return 1 - batches / queries, sum(a.right for a in accounts) / max(1, sum(a.guesses for a in accounts))


@dataclass(slots=True)
class Check:
    """Answers compared with sequential retrieval's, by knowledge base: how many there were, and which differ."""

    compared: dict[str, int] = field(default_factory=dict)
    differ: list[str] = field(default_factory=list)


def check(bench: Bench, bases: Bases, questions: Sequence[Question]) -> Check:
    """Every question over every knowledge base, greedy and seeded, by fixed stride and OS3, waiting and not."""
    found = Check()
    ways = [
        RetrievalSettings(stride=stride, asynchronous=asynchronous)
        for stride in CHECKED
        for asynchronous in (False, True)
    ]
    for kind in (*KINDS, "remote"):
        with bases.opened(kind) as base:
            pace = RequestStride()
            for index, question in enumerate(questions):
                bench.progress(f"{kind}: question {index + 1} of {len(questions)}")
                seed = index if index % 2 else None
                plain = bench.answer(question, base, SEQUENTIAL, pace, seed=seed)
                for way in ways:
                    run = bench.answer(question, base, SPECULATIVE, pace, way, seed)
                    found.compared[kind] = found.compared.get(kind, 0) + 1
                    if run.tokens != plain.tokens:
                        found.differ.append(f"{kind}, {question.id}, stride {way.stride}, {way.asynchronous=}")
    return found
