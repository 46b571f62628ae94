"""What the cache benchmark must reach, and whether it did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from agentspec.benchmarks.cache import CacheReport
from agentspec.benchmarks.cache_costs import TREE, Costs, Latency
from agentspec.benchmarks.cache_threads import Gains

Verdict = Literal["aim met", "met", "missed", "not measured"]

_MICRO = 1e-6
_LARGE = 100_000_000
_OPENED = 10_000_000
_CALIBRATED = 32  # budget at which calibration is judged


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure with its bounds, all in `unit`. `note` says what limits the comparison."""

    figure: str
    value: float | None
    unit: str
    required: float
    aim: float
    at_most: bool = True
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        if self.value is None:
            return "not measured"
        if self._holds(self.value, self.aim):
            return "aim met"
        return "met" if self._holds(self.value, self.required) else "missed"

    def _holds(self, value: float, bound: float) -> bool:
        return value <= bound if self.at_most else value >= bound


def goals(report: CacheReport) -> list[Goal]:
    """Every goal, those without a measurement included."""
    return [*_drafting_goals(report), *_cost_goals(report.costs)]


def _drafting_goals(report: CacheReport) -> Iterator[Goal]:
    for budget, mean, worst in ((8, (1.05, 1.1), 1.03), (32, (1.12, 1.2), 1.06)):
        ratios = report.ratios(budget) if budget in report.budgets else []
        note = f"{len(ratios)} files with a figure to compare with"
        value = report.mean_ratio(budget) if ratios else None
        yield Goal(f"tokens/step vs peer, budget {budget}, geometric mean", value, "x", *mean, at_most=False, note=note)
        least = min(ratios) if ratios else None
        yield Goal(f"tokens/step vs peer, budget {budget}, lowest file", least, "x", worst, worst, at_most=False)
    judged = [file.replays[_CALIBRATED] for file in report.files if _CALIBRATED in file.replays]
    value = max((replay.worst_calibration() for replay in judged), default=None)
    yield Goal(f"calibration at budget {_CALIBRATED}, worst bin of any file", value, "", 0.05, 0.02)


def _cost_goals(costs: Costs | None) -> Iterator[Goal]:
    def figure(read: Callable[[Costs], float]) -> float | None:
        return read(costs) if costs else None

    yield from _latency_goals(costs.draft if costs else None, "1 M", (50, 15), (150, 50))
    yield from _latency_goals(costs.large if costs else None, "100 M", (250, 80), (800, 300))
    yield Goal("insert per token, merges included", _micro(figure(lambda c: c.insert)), "us", 2.0, 0.7)
    yield Goal("request start per prompt token", _micro(figure(lambda c: c.request_start)), "us", 0.1, 0.01)
    yield Goal("bytes per cached token, memory", figure(lambda c: c.memory_bytes), "B", 60, 30)
    yield Goal("bytes per cached token, segment", costs.segment_bytes if costs else None, "B", 12, 9)
    yield _open_goal(costs)
    yield from _thread_goals(costs.gains if costs else None)


def _thread_goals(gains: Gains | None) -> Iterator[Goal]:
    note = f"plain hashing in two threads: {gains.two_cores:.1f}x; load {gains.load:.1f}" if gains else ""
    for figure, value in (
        ("two threads drafting vs one", gains.two_threads if gains else None),
        ("16 requests in one call vs one by one", gains.batch if gains else None),
    ):
        yield Goal(figure, value, "x", 1.5, 1.9, at_most=False, note=note)


def _latency_goals(
    latency: Latency | None, size: str, middle: tuple[float, float], late: tuple[float, float]
) -> Iterator[Goal]:
    note = f"{latency.cached_tokens:,} tokens, trees of {latency.tree:.1f} tokens" if latency else ""
    name = f"drafting a tree of {TREE}, {size} cached tokens"
    yield Goal(f"{name}, median", _micro(latency.median if latency else None), "us", *middle, note=note)
    yield Goal(f"{name}, p99", _micro(latency.p99 if latency else None), "us", *late, note=note)


def _open_goal(costs: Costs | None) -> Goal:
    """Fewer tokens than the goal's can miss it, but not meet it."""
    name = "open a cache of 10 M tokens until the first draft"
    if costs is None:
        return Goal(name, None, "s", 1.0, 0.1)
    note = f"{costs.open_seconds:.2f} s with {costs.opened_tokens:,} tokens"
    judged = costs.opened_tokens >= _OPENED or costs.open_seconds > 1.0
    return Goal(name, costs.open_seconds if judged else None, "s", 1.0, 0.1, note=note)


def _micro(seconds: float | None) -> float | None:
    return None if seconds is None else seconds / _MICRO
