"""The cases of the retrieval benchmark: their runs, bounds, goals and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import RenderableType

from agentspec.benchmarks import report
from agentspec.benchmarks.report import Ratio, RatioGoal, paired_ratio
from agentspec.reasoning.retrieval.search import SearchStats

SEQUENTIAL, SPECULATIVE, WAITING = "sequential", "speculative", "speculative, waiting"
SAVED_REQUIRED, SAVED_AIM = 0.5, 0.65
NEAR_BOUND = 0.9
PARTS = ("generate", "rolled_back", "retrieve", "verify", "encode")


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
        generate, retrieve, encode = (sum(getattr(account, part) for account in accounts) / rounds for part in parts)
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
    """All measurements. `saved` is 1 - batches / queries at a fixed stride of 3 with synchronous verification."""

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


def speedup_goal(
    required: float, aim: float | None = None, variant: str = SPECULATIVE, baseline: str = SEQUENTIAL
) -> RatioGoal:
    """The goal for the ratio of two variants' seconds; without `aim`, the aim is nine tenths of the bound."""
    return RatioGoal(variant, baseline, required, aim)


def _goals(cases: Sequence[RetrievalCase]) -> RenderableType:
    columns = ("case", "of", "measured", "required", "aim", "bound", "of bound", "gamma", "same answers", "")
    rows = (_cells(case, goal) for case in cases for goal in case.goals)
    return report.table("speculative over sequential retrieval", columns, rows)


def _cells(case: RetrievalCase, goal: RatioGoal) -> tuple[str, ...]:
    ratio, bound = case.ratio(goal), case.bound()
    aim = NEAR_BOUND * bound if goal.aim is None else goal.aim
    bounded = goal.baseline == SEQUENTIAL
    return (
        case.name,
        goal.variant if bounded else f"beside / {goal.baseline}",
        str(ratio),
        f"{goal.required:.2f}x",
        f"{aim:.2f}x",
        f"{bound:.2f}x" if bounded else "",
        f"{ratio.median / bound:.0%}" if bounded else "",
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
