"""Speculative against sequential retrieval on one model: compares wall time and answers, and shows bounds.

All variants of a case answer each question one after another, in an order that rotates from question to question. Each
run has its own tenant, so that it finds no KV slots of another run. Token drafting is off, so that only retrieval is
measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from agentspec.backends.settings import TorchSettings
from agentspec.benchmarks.report import Progress, rotated
from agentspec.benchmarks.retrieval.bases import Bases, CorpusQuestion
from agentspec.benchmarks.retrieval.cases import (
    SEQUENTIAL,
    SPECULATIVE,
    WAITING,
    RetrievalCase,
    RetrievalReport,
    RetrievalRun,
    speedup_goal,
)
from agentspec.reasoning.retrieval.knowledge.base import KnowledgeBase
from agentspec.reasoning.retrieval.ralmspec import ralmspec, sequential
from agentspec.reasoning.retrieval.search import SearchStats, VerifiedText
from agentspec.reasoning.settings import RetrievalSettings
from agentspec.speculation.stride import StrideMeasurements
from agentspec.types import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from agentspec.backends.torch import TorchBackend

SAMPLED = 0.8
CHECKED: tuple[int | Literal["os3"], ...] = (3, "os3")
SAVED_TOKENS = 96  # long enough for batching to pay: an answer's first and last queries form small batches


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
        stride: int | Literal["os3"] = "os3",
        seed: int | None = None,
    ) -> RetrievalRun:
        return self.loop.run_until_complete(self._answer(question, base, variant, measured, stride, seed))

    async def _answer(
        self,
        question: CorpusQuestion,
        base: KnowledgeBase,
        variant: str,
        measured: StrideMeasurements,
        stride: int | Literal["os3"],
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
        settings = RetrievalSettings(stride=stride)
        given: dict[str, Any] = {"backend": self.backend, "knowledge": base, "settings": settings, "stats": account}
        events = (
            sequential(request, **given)
            if variant == SEQUENTIAL
            else ralmspec(request, **given, measured=measured, asynchronous=variant != WAITING)
        )
        async for event in events:
            if isinstance(event, VerifiedText):
                tokens += event.token_ids
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
        for times, goals, variants in (
            (4, (speedup_goal(1.5), speedup_goal(1.1, 1.3, SPECULATIVE, WAITING)), (SEQUENTIAL, SPECULATIVE, WAITING)),
            (1, (speedup_goal(1.1),), (SEQUENTIAL, SPECULATIVE)),
        ):
            delayed.delay = times * report.round_seconds
            case = RetrievalCase(f"dense, a delay of {times} rounds", goals, delayed.delay)
            report.cases.append(bench.measure(case, delayed, questions, variants))
    return report


def batches_saved(
    bench: RetrievalBench, base: KnowledgeBase, questions: Sequence[CorpusQuestion]
) -> tuple[float, float]:
    """1 - batches / queries, and the hit rate, at a fixed stride of 3 with synchronous verification."""
    longer, accounts = replace(bench, max_tokens=SAVED_TOKENS), []
    for index, question in enumerate(questions):
        bench.progress(f"fixed stride: question {index + 1} of {len(questions)}")
        accounts.append(longer.answer(question, base, WAITING, StrideMeasurements(), 3).account)
    batches, queries = sum(a.batches for a in accounts), sum(a.queries for a in accounts)
    return 1 - batches / queries, sum(a.right for a in accounts) / max(1, sum(a.guesses for a in accounts))
