"""What a small model drafts for the local engine, counted: alone and beside the token cache, one answer and several.

No clock: the engine's time is computed, a forward of the target costing `1 + SLOPE * (tokens - 1)` units and one of the
draft model the same divided by `ratio`. So what is drafted, and when the small model is asked at all, is what it would
be for a pair of that ratio, on any machine and under any load; of answers at once, whether they start in one step is up
to the machine. Only the host's work is measured, in processor time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from rich.console import RenderableType

from agentspec.backends.settings import TorchSettings
from agentspec.benchmarks import report
from agentspec.benchmarks.report import Progress
from agentspec.benchmarks.runs import Run, ask
from agentspec.recordings.prompt_sets import load_prompts
from agentspec.types import Labels, SamplingParams

if TYPE_CHECKING:
    from agentspec.backends.torch import TorchBackend
    from agentspec.backends.torch.model.batch import BatchItem
    from agentspec.backends.torch.model.target import TargetModel

UNIT = 0.01  # computed seconds of a one-token forward of the target
SLOPE = 0.02  # of it, for each further token of a forward, as where a forward is bound by reading the weights
SIZES = (1, 2, 4, 8, 16, 32, 64)
SETS = {"edits": "edit_short", "control": "control"}
NONE, CACHE, MODEL, BOTH = "no drafts", "token cache", "small model", "both"
CLOCKED = (
    "agentspec.backends.torch.drafters.forwards",
    "agentspec.backends.torch.drafters.draft_model",
    "agentspec.backends.torch.engine.speculator",
    "agentspec.backends.torch.engine.step",
)
COLUMNS = (
    "drafter", "at once", "tokens/step", "draft forwards", "for 100 tokens", "answers a forward", "computed speed-up",
    "host ms a step", f"same as {NONE}",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What to run. `ratio` is how many times as long a forward of the target takes as one of the draft model."""

    model: str
    draft_model: str
    ratio: float = 5.0
    limit: int | None = None
    max_tokens: int = 96
    at_once: Sequence[int] = (1, 4)


@dataclass(slots=True)
class ComputedClock:
    """The engine's time, and what it computed."""

    ratio: float
    now: float = 0.0
    steps: int = 0
    draft_forwards: int = 0
    draft_items: int = 0
    host: float = 0.0  # seconds of processor time of proposing, without the draft model's forwards

    def __call__(self) -> float:
        return self.now

    def seconds(self, tokens: int) -> float:
        return UNIT * (1.0 + SLOPE * (tokens - 1))

    def target(self, items: Sequence[BatchItem]) -> None:
        self.now += self.seconds(sum(map(len, items)))
        self.steps += 1

    def draft(self, items: Sequence[BatchItem]) -> None:
        self.now += self.seconds(sum(map(len, items))) / self.ratio
        self.draft_forwards += 1
        self.draft_items += len(items)


@dataclass(frozen=True, slots=True)
class DrafterCounts:
    """What a drafter came to on one set of prompts."""

    drafter: str
    at_once: int
    tokens: int
    steps: int  # of the answers
    engine_steps: int
    draft_forwards: int
    draft_items: int
    computed: float  # units of time
    host: float
    answers: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class DraftModelReport:
    plan: DraftPlan
    sets: dict[str, list[DrafterCounts]] = field(default_factory=dict)

    def show(self) -> Iterator[RenderableType]:
        for name, rows in self.sets.items():
            title = f"{name}: {len(rows[0].answers)} answers, {rows[0].tokens} tokens, ratio {self.plan.ratio:g}"
            yield report.table(title, COLUMNS, (_row(row, rows) for row in rows))

    def data(self) -> dict[str, Any]:
        return asdict(self)


def _row(row: DrafterCounts, rows: Sequence[DrafterCounts]) -> tuple[str, ...]:
    plain = next(other for other in rows if other.drafter == NONE and other.at_once == row.at_once)
    same = sum(one == other for one, other in zip(row.answers, plain.answers, strict=True))
    return (
        row.drafter,
        str(row.at_once),
        f"{row.tokens / row.steps:.2f}",
        str(row.draft_forwards),
        f"{100 * row.draft_forwards / row.tokens:.0f}",
        f"{row.draft_items / row.draft_forwards:.1f}" if row.draft_forwards else "-",
        f"{plain.computed / row.computed:.2f}x",
        f"{1e3 * row.host / row.engine_steps:.2f}",
        f"{same}/{len(row.answers)}",
    )


def run_draft_models(plan: DraftPlan, *, progress: Progress) -> DraftModelReport:
    """Run every drafter on every set, each answer with an empty cache. Raises what loading a model raises."""
    found, drafters = (
        DraftModelReport(plan),
        {NONE: (), CACHE: ("suffix",), MODEL: ("model",), BOTH: ("suffix", "model")},
    )
    for drafter, names in drafters.items():
        with _computed_time(plan.ratio) as clock, _loaded(plan, names, clock, progress) as backend:
            for set_name, prompts in SETS.items():
                texts = load_prompts(prompts)[: plan.limit]  # type: ignore[arg-type]
                for at_once in plan.at_once:
                    progress(f"{set_name}: {drafter}, {at_once} at once")
                    counted = _count(backend, clock, texts, set_name, at_once, plan)
                    found.sets.setdefault(set_name, []).append(DrafterCounts(drafter, at_once, *counted))
    return found


@contextmanager
def _computed_time(ratio: float) -> Iterator[ComputedClock]:
    """Let the engine read `ComputedClock`s instead of the machine's."""
    clock = ComputedClock(ratio)
    samples = [(size, 0, clock.seconds(size)) for size in SIZES]
    patches: list[Any] = [patch(f"{module}.perf_counter", clock) for module in CLOCKED]
    patches.append(patch("agentspec.backends.torch.backend.measure_costs", lambda target: samples))
    patches.append(patch("agentspec.backends.torch.backend.measure_batches", lambda target: []))
    for each in patches:
        each.start()
    try:
        yield clock
    finally:
        for each in patches:
            each.stop()


@contextmanager
def _loaded(plan: DraftPlan, names: Sequence[str], clock: ComputedClock, progress: Progress) -> Iterator[TorchBackend]:
    """The engine with these drafters; forwards advance the clock."""
    from agentspec.backends.torch import TorchBackend
    from agentspec.backends.torch.engine import step
    from agentspec.backends.torch.loader import load, load_draft
    from agentspec.cache import SuffixCache

    progress(f"loading {plan.model}")
    given: dict[str, Any] = {"drafters": tuple(names)} if names else {"max_draft_tokens": 0}
    if "model" in names:
        given["draft_model"] = plan.draft_model
    settings = TorchSettings(model=plan.model, **{"prefix_bytes": 0, **given})
    loaded, cache = load(settings), SuffixCache.open()
    small = load_draft(settings, loaded)
    backend = TorchBackend(loaded, settings, cache, small)
    _counting(backend.target, clock.target)
    if small is not None:
        _counting(small.model, clock.draft, host=clock)
    propose = step.propose

    def proposed(scheduled: Any) -> None:
        started = time.thread_time()
        propose(scheduled)
        clock.host += time.thread_time() - started

    try:
        with patch.object(step, "propose", proposed):
            yield backend
    finally:
        asyncio.run(backend.aclose())
        cache.close()


def _counting(
    model: TargetModel, count: Callable[[Sequence[BatchItem]], None], host: ComputedClock | None = None
) -> None:
    """Tell `count` of each forward; with `host`, take its processor time off the host's."""
    compute, inside = model.forward_batch, False

    def forward_batch(items: Sequence[BatchItem]) -> Any:
        nonlocal inside
        if inside:  # a model that computes one sequence at a time calls itself
            return compute(items)
        inside, started = True, time.thread_time()
        try:
            return compute(items)
        finally:
            inside = False
            count(items)
            if host is not None:
                host.host -= time.thread_time() - started

    model.forward_batch = forward_batch  # type: ignore[method-assign]


def _count(
    backend: TorchBackend, clock: ComputedClock, texts: Sequence[str], name: str, at_once: int, plan: DraftPlan
) -> tuple[Any, ...]:
    """What `DrafterCounts` holds beside the drafter's name and the number of answers at once."""
    before = ComputedClock(plan.ratio, clock.now, clock.steps, clock.draft_forwards, clock.draft_items, clock.host)
    runs = asyncio.run(_answers(backend, texts, name, at_once, plan))
    return (
        sum(len(run.tokens) for run in runs),
        sum(run.speculation.steps if run.speculation else len(run.tokens) for run in runs),
        clock.steps - before.steps,
        clock.draft_forwards - before.draft_forwards,
        clock.draft_items - before.draft_items,
        clock.now - before.now,
        clock.host - before.host,
        tuple(run.tokens for run in runs),
    )


async def _answers(backend: TorchBackend, texts: Sequence[str], name: str, at_once: int, plan: DraftPlan) -> list[Run]:
    """All answers, `at_once` at a time; those of the control are drawn at temperature 1."""
    found: list[Run] = []
    for start in range(0, len(texts), at_once):
        found += await asyncio.gather(
            *(
                ask(
                    backend,
                    backend.encode_chat([{"role": "user", "content": text}]),
                    SamplingParams(temperature=float(name == "control"), seed=index, max_tokens=plan.max_tokens),
                    f"{name} {at_once} {index}",
                    labels=Labels(f"run-{index}"),
                    store=False,
                )
                for index, text in enumerate(texts[start : start + at_once], start)
            )
        )
    return found
