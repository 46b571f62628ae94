"""Speculative against sequential retrieval on one model: compares wall time and answers, and shows bounds.

All variants of a case answer each question one after another, in an order that rotates from question to question. Each
run has its own tenant, so that it finds no KV slots of another run. Token drafting is off, so that only retrieval is
measured.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from agentspec.backends.settings import TorchSettings
from agentspec.benchmarks import report
from agentspec.benchmarks.report import Progress, Ratio, RatioGoal, paired_ratio, rotated
from agentspec.benchmarks.retrieval.bases import Bases, CorpusQuestion
from agentspec.reasoning.retrieval.knowledge.base import KnowledgeBase
from agentspec.reasoning.retrieval.ralmspec import PARTS, SearchStats, ralmspec, sequential
from agentspec.speculation.stride import StrideMeasurements
from agentspec.types import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from agentspec.backends.torch import TorchBackend

SAMPLED = 0.8
SAVED_TOKENS = 96  # long enough for batching to pay: an answer's first and last queries form small batches


SEQUENTIAL, SPECULATIVE = "sequential", "speculative"
SAVED_REQUIRED, SAVED_AIM = 0.5, 0.65
NEAR_BOUND = 0.9


@dataclass(frozen=True, slots=True)
class RetrievalRun:
    """One answer: its token ids, seconds of wall time, and how they were spent."""

    tokens: tuple[int, ...]
    seconds: float
    account: SearchStats


@dataclass(slots=True)
class RetrievalCase:
    """A knowledge base, and the runs of each variant with it, in the order of the questions."""

    name: str
    goals: tuple[RatioGoal, ...]
    delay: float = 0.0
    runs: dict[str, list[RetrievalRun]] = field(default_factory=dict)

    def ratio(self, goal: RatioGoal) -> Ratio:
        """How many times faster the goal's variant is than its baseline."""
        baseline, variant = (self._seconds(name) for name in (goal.baseline, goal.variant))
        return paired_ratio(baseline, variant)

    def same(self, variant: str) -> int:
        """The number of answers that equal sequential retrieval's, token for token."""
        pairs = zip(self.runs[variant], self.runs[SEQUENTIAL], strict=True)
        return sum(left.tokens == right.tokens for left, right in pairs)

    def gamma(self, variant: str = SPECULATIVE) -> float:
        """The share of right guesses, which is the accuracy of the cache."""
        accounts = [run.account for run in self.runs[variant]]
        guesses = sum(account.guesses for account in accounts)
        return sum(account.right for account in accounts) / guesses if guesses else 0.0

    def costs(self) -> tuple[float, float, float]:
        """Mean seconds per round of sequential retrieval for generating, for searching and for making the query."""
        accounts = [run.account for run in self.runs[SEQUENTIAL]]
        rounds = sum(account.rounds for account in accounts)
        parts = ("generate", "retrieve", "encode")
        generate, retrieve, encode = (sum(account.seconds[part] for account in accounts) / rounds for part in parts)
        return generate, retrieve, encode

    def bound(self) -> float:
        """The speed-up if verification took no time: a right guess saves its search, a wrong guess saves nothing.

        An answer always waits for its first document.
        """
        (generate, retrieve, encode), gamma = self.costs(), self.gamma()
        rounds = sum(run.account.rounds for run in self.runs[SEQUENTIAL]) / len(self.runs[SEQUENTIAL])
        waits = 1 + (1 - gamma) * (rounds - 1)
        return rounds * (generate + encode + retrieve) / (rounds * (generate + encode) + waits * retrieve)

    def shares(self, variant: str) -> dict[str, float]:
        """The share of the seconds that each kind of work took."""
        total = sum(self._seconds(variant))
        parts = self.runs[variant][0].account.seconds
        return {part: sum(run.account.seconds[part] for run in self.runs[variant]) / total for part in parts}

    def _seconds(self, variant: str) -> list[float]:
        return [run.seconds for run in self.runs[variant]]


@dataclass(slots=True)
class RetrievalReport:
    """All measurements. `saved` is 1 - batches / queries at a fixed stride of 3."""

    cases: list[RetrievalCase] = field(default_factory=list)
    saved: float = 0.0
    saved_gamma: float = 0.0
    round_seconds: float = 0.0

    def show(self) -> Iterator[RenderableType]:
        yield f"a round of sequential retrieval without its search: {self.round_seconds:.3f} s"
        yield _goals(self.cases)
        yield (
            f"batches saved at fixed stride 3: {self.saved:.0%} (required {SAVED_REQUIRED:.0%}, aim {SAVED_AIM:.0%},"
            f" hit rate {self.saved_gamma:.2f}): {'met' if self.saved >= SAVED_REQUIRED else 'MISSED'}"
        )
        yield _times(self.cases)

    def data(self) -> dict[str, Any]:
        return {**asdict(self), "cases": list(map(_data, self.cases))}


def speedup_goal(required: float, aim: float | None = None) -> RatioGoal:
    """The goal for the speed-up over sequential retrieval; without `aim`, the aim is nine tenths of the bound."""
    return RatioGoal(SPECULATIVE, SEQUENTIAL, required, aim)


def _goals(cases: Sequence[RetrievalCase]) -> RenderableType:
    columns = ("case", "of", "measured", "required", "aim", "bound", "of bound", "gamma", "same answers", "")
    rows = (_cells(case, goal) for case in cases for goal in case.goals)
    return report.table("speculative over sequential retrieval", columns, rows)


def _cells(case: RetrievalCase, goal: RatioGoal) -> tuple[str, ...]:
    ratio, bound = case.ratio(goal), case.bound()
    aim = NEAR_BOUND * bound if goal.aim is None else goal.aim
    return (
        case.name,
        goal.variant,
        str(ratio),
        f"{goal.required:.2f}x",
        f"{aim:.2f}x",
        f"{bound:.2f}x",
        f"{ratio.median / bound:.0%}",
        f"{case.gamma(goal.variant):.2f}",
        f"{case.same(goal.variant)}/{ratio.pairs}",
        ratio.verdict(goal.required),
    )


def _times(cases: Sequence[RetrievalCase]) -> RenderableType:
    columns = ("case", "variant", "seconds", *PARTS, "queries", "batches", "strides")
    rows = (_time_cells(case, variant) for case in cases for variant in case.runs)
    return report.table("where the time went, and the strides", columns, rows)


def _time_cells(case: RetrievalCase, variant: str) -> tuple[str, ...]:
    runs, shares = case.runs[variant], case.shares(variant)
    return (
        case.name,
        variant,
        f"{sum(run.seconds for run in runs) / len(runs):.2f}",
        *(f"{shares[part]:.0%}" for part in PARTS),
        str(sum(run.account.queries for run in runs)),
        str(sum(run.account.batches for run in runs)),
        _strides(case, variant) if variant != SEQUENTIAL else "",
    )


def _strides(case: RetrievalCase, variant: str) -> str:
    """How often each stride was taken; 0 stands for a search that the answer waited for."""
    counts = Counter(stride for run in case.runs[variant] for stride in run.account.strides)
    return ", ".join(f"{count} of {stride}" for stride, count in sorted(counts.items()))


def _data(case: RetrievalCase) -> dict[str, Any]:
    figures = {
        "goals": [asdict(goal) | {"ratio": asdict(case.ratio(goal))} for goal in case.goals],
        "bound": case.bound(),
        "gamma": case.gamma(),
        "round": dict(zip(("generate", "retrieve", "encode"), case.costs(), strict=True)),
        "same": {variant: case.same(variant) for variant in case.runs},
    }
    return asdict(case) | {"figures": figures}


@dataclass(slots=True)
class RetrievalBench:
    """A loaded model that answers questions with any of the knowledge bases."""

    backend: TorchBackend
    max_tokens: int
    progress: Progress
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    runs: Iterator[int] = field(default_factory=count)

    @classmethod
    def load(cls, model: str, max_tokens: int, progress: Progress) -> RetrievalBench:
        from agentspec.backends.torch import TorchBackend

        progress(f"loading {model}")
        return cls(TorchBackend.load(TorchSettings(model=model, max_draft_tokens=0)), max_tokens, progress)

    def close(self) -> None:
        self.loop.run_until_complete(self.backend.aclose())
        self.loop.close()

    def measure(
        self, case: RetrievalCase, base: KnowledgeBase, questions: Sequence[CorpusQuestion], variants: Sequence[str]
    ) -> RetrievalCase:
        """Answer every question by every variant. Each variant keeps the costs it has measured for its next answer."""
        measurements = {variant: StrideMeasurements() for variant in variants}
        self.answer(questions[0], base, variants[0], StrideMeasurements())  # the first search includes one-time setup
        for index, question in enumerate(questions):
            self.progress(f"{case.name}: question {index + 1} of {len(questions)}")
            for variant, measured in rotated(measurements, index):
                case.runs.setdefault(variant, []).append(self.answer(question, base, variant, measured))
        return case

    def answer(
        self,
        question: CorpusQuestion,
        base: KnowledgeBase,
        variant: str,
        measured: StrideMeasurements,
        stride: int | None = None,
        seed: int | None = None,
    ) -> RetrievalRun:
        return self.loop.run_until_complete(self._answer(question, base, variant, measured, stride, seed))

    async def _answer(
        self,
        question: CorpusQuestion,
        base: KnowledgeBase,
        variant: str,
        measured: StrideMeasurements,
        stride: int | None,
        seed: int | None,
    ) -> RetrievalRun:
        temperature = 0.0 if seed is None else SAMPLED
        request = GenerateRequest(
            self.backend.model_name,
            messages=[{"role": "user", "content": question.text}],
            sampling=SamplingParams(temperature=temperature, seed=seed, max_tokens=self.max_tokens),
            tenant=f"run-{next(self.runs)}",
        )
        account, began = SearchStats(), time.perf_counter()
        tokens: list[int] = []
        given: dict[str, Any] = {"backend": self.backend, "knowledge": base, "stats": account}
        deltas = (
            sequential(request, **given)
            if variant == SEQUENTIAL
            else ralmspec(request, **given, measured=measured, stride=stride)
        )
        async for delta in deltas:
            tokens += delta.token_ids
        return RetrievalRun(tuple(tokens), time.perf_counter() - began, account)


def run_retrieval(
    bench: RetrievalBench, bases: Bases, questions: Sequence[CorpusQuestion], *, synthetic: int
) -> RetrievalReport:
    """Run all cases, with `synthetic` vectors in an exact index (0: none)."""
    report = RetrievalReport()
    for kind in ("hnsw", "bm25"):
        with bases.local(kind) as base:
            case = RetrievalCase(f"{kind} over the corpus", (speedup_goal(0.98, 1.05),))
            report.cases.append(bench.measure(case, base, questions, (SEQUENTIAL, SPECULATIVE)))
    generate, _, encode = report.cases[0].costs()
    report.round_seconds = generate + encode
    with bases.local("dense") as base:
        report.saved, report.saved_gamma = batches_saved(bench, base, questions)
    if synthetic:
        with bases.synthetic(synthetic) as base:
            case = RetrievalCase(f"exact dense, {synthetic:,} x {bases.dimensions}", (speedup_goal(0.98, 1.1),))
            report.cases.append(bench.measure(case, base, questions, (SEQUENTIAL, SPECULATIVE)))
    with bases.delayed() as delayed:
        for times, goal in (
            (4, 1.5),
            (1, 1.1),
        ):
            delayed.delay = times * report.round_seconds
            case = RetrievalCase(f"dense, a delay of {times} rounds", (speedup_goal(goal),), delayed.delay)
            report.cases.append(bench.measure(case, delayed, questions, (SEQUENTIAL, SPECULATIVE)))
    return report


def batches_saved(
    bench: RetrievalBench, base: KnowledgeBase, questions: Sequence[CorpusQuestion]
) -> tuple[float, float]:
    """1 - batches / queries, and the hit rate, at a fixed stride of 3."""
    longer, accounts = replace(bench, max_tokens=SAVED_TOKENS), []
    for index, question in enumerate(questions):
        bench.progress(f"fixed stride: question {index + 1} of {len(questions)}")
        accounts.append(longer.answer(question, base, SPECULATIVE, StrideMeasurements(), 3).account)
    batches, queries = sum(a.batches for a in accounts), sum(a.queries for a in accounts)
    return 1 - batches / queries, sum(a.right for a in accounts) / max(1, sum(a.guesses for a in accounts))
