"""The cache benchmark: replays recorded calls at several budgets, compares the peer, and measures costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType

from agentspec.benchmarks import report
from agentspec.benchmarks.cache.costs import CACHED, TREE, Costs, Work, measure_costs
from agentspec.benchmarks.cache.peer import PeerCache, installed_version
from agentspec.benchmarks.report import Figure, Progress, names_of
from agentspec.benchmarks.traces import Encode, read_calls
from agentspec.recordings.replay import EncodedCall, Replay, replay, replay_cache


def run_cache(
    paths: Sequence[Path],
    encode: Encode,
    *,
    calls: int,
    budgets: Sequence[int],
    open_tokens: int | None = None,
    progress: Progress,
) -> CacheReport:
    """Replay the first `calls` calls of each file at every budget, then measure costs, with `open_tokens` on disk.

    Raises `ConfigurationError`.
    """
    files, everything = [], list[EncodedCall]()
    installed = installed_version()
    for path, name in zip(paths, names_of(paths), strict=True):
        name = name.removesuffix(".jsonl.gz")
        progress(f"{name}: encoding")
        recorded = read_calls(path, encode, calls)
        everything += [replace(call, session=f"{name} {call.session}") for call in recorded]
        result = FileResult(name)
        for budget in sorted(set(budgets)):
            progress(f"{name}: replaying {len(recorded)} calls at budget {budget}")
            result.replays[budget] = replay_cache(recorded, budget)
        for budget in budgets if installed else ():
            progress(f"{name}: the peer at budget {budget}")
            result.peer[budget] = replay(recorded, PeerCache().request, budget).tokens_per_step
        files.append(result)
    source = (
        f"arctic-inference {installed}, best tree, run here"
        if installed
        else "a peer that is not installed: pip install arctic-inference"
    )
    measured = measure_costs(everything, open_tokens, progress) if open_tokens else None
    return CacheReport(files, sorted(budgets), source, measured)


_MICRO = 1e-6
_OPENED = 10_000_000
_CALIBRATED = 32  # budget at which calibration is judged


@dataclass(slots=True)
class FileResult:
    """The results of one trace file: replays and the peer's tokens per step, both by budget."""

    name: str
    replays: dict[int, Replay] = field(default_factory=dict)
    peer: dict[int, float] = field(default_factory=dict)

    def ratio(self, budget: int) -> float | None:
        """Tokens per step divided by the peer's; None if the peer has no figure."""
        known = self.peer.get(budget)
        return self.replays[budget].tokens_per_step / known if known else None


@dataclass(frozen=True, slots=True)
class CacheReport:
    files: Sequence[FileResult]
    budgets: Sequence[int]  # ascending
    peer_source: str  # where the peer's figures come from
    costs: Costs | None

    def ratios(self, budget: int) -> list[float]:
        """Tokens per step divided by the peer's, for each file with a figure of the peer."""
        return [ratio for file in self.files if (ratio := file.ratio(budget)) is not None]

    def mean_ratio(self, budget: int) -> float | None:
        """The geometric mean of `ratios`; None if there are none."""
        ratios = self.ratios(budget)
        return float(np.exp(np.mean(np.log(ratios)))) if ratios else None

    def goals(self) -> list[Figure]:
        """Every goal, including goals without a measurement."""
        return [*_drafting_goals(self), *_cost_goals(self.costs)]

    def show(self) -> Iterator[RenderableType]:
        yield _quality_table(self)
        yield _calibration_table(self)
        yield _timing_table(self)
        if self.costs:
            yield _costs_table(self.costs)
        yield report.table(
            "Goals", ("figure", "measured", "required", "aim", "verdict", "note"), map(_goal_cells, self.goals())
        )

    def data(self) -> dict[str, Any]:
        """All figures of the tables, and the counts of every call."""
        return {
            "peer": self.peer_source,
            "files": [_file_data(file) for file in self.files],
            "costs": asdict(self.costs) if self.costs else None,
            "goals": [_goal_data(goal) for goal in self.goals()],
        }


def _drafting_goals(found: CacheReport) -> Iterator[Figure]:
    for budget, mean, worst in ((8, (1.08, 1.12), 1.05), (32, (1.17, 1.22), 1.13)):
        ratios = found.ratios(budget) if budget in found.budgets else []
        note = f"{len(ratios)} files with a figure to compare with"
        value = found.mean_ratio(budget) if ratios else None
        yield Figure(
            f"tokens/step vs peer, budget {budget}, geometric mean", value, "x", *mean, at_most=False, note=note
        )
        least = min(ratios) if ratios else None
        yield Figure(f"tokens/step vs peer, budget {budget}, lowest file", least, "x", worst, worst, at_most=False)
    judged = [file.replays[_CALIBRATED] for file in found.files if _CALIBRATED in file.replays]
    value = max((worst_calibration(replay) for replay in judged), default=None)
    yield Figure(f"calibration at budget {_CALIBRATED}, worst bin of any file", value, "", 0.05, 0.02)


def _cost_goals(costs: Costs | None) -> Iterator[Figure]:
    yield from _work_goals(costs.recorded if costs else None, CACHED, ((60, 45), (150, 120), (6, 4.5)))
    yield from _work_goals(costs.opened if costs else None, _OPENED, ((105, 80), (260, 200), (8, 6)))
    yield from _peer_goals(costs)
    new = costs.recorded.new_prompt if costs else None
    yield Figure("request start per token of a new prompt", _micro(new), "us", 0.25, 0.1)
    yield Figure("insert per token, merges included", _micro(costs.insert if costs else None), "us", 2.0, 0.7)
    yield Figure("bytes per cached token, memory", costs.memory_bytes if costs else None, "B", 11, 10)
    yield Figure("bytes per cached token, segment", costs.segment_bytes if costs else None, "B", 12, 9)
    yield _open_goal(costs)


def _work_goals(work: Work | None, size: int, bounds: Sequence[tuple[float, float]]) -> Iterator[Figure]:
    """Goals for a cache of `size` recorded tokens; a smaller one is not judged."""
    judged = work if work and work.cached_tokens >= size else None
    note = f"trees of {judged.tree:.1f} tokens" if judged else ""
    name = f"{size // 1_000_000} M recorded tokens"
    values = [_micro(value) for value in ((judged.median, judged.p99, judged.commit) if judged else (None,) * 3)]
    for what, value, bound in zip((f"draft of {TREE}, median", "p99", "commit per token"), values, bounds, strict=True):
        yield Figure(f"{name}: {what}", value, "us", *bound, note=note)


def _peer_goals(costs: Costs | None) -> Iterator[Figure]:
    both = (costs.peer, costs.recorded) if costs and costs.peer else None
    draft, commit = (both[0].median / both[1].median, both[0].extend / both[1].commit) if both else (None, None)
    yield Figure("draft, the peer's time over ours", draft, "x", 1.4, 1.8, at_most=False)
    yield Figure("commit, the peer's time over ours", commit, "x", 1.15, 1.5, at_most=False)


def _open_goal(costs: Costs | None) -> Figure:
    """The goal for opening a cache. A smaller cache than the goal names can miss it but not meet it."""
    name = "open a cache of 10 M tokens until the first draft"
    if costs is None:
        return Figure(name, None, "s", 1.0, 0.1)
    note = f"{costs.open_seconds:.2f} s with {costs.opened_tokens:,} tokens"
    judged = costs.opened_tokens >= _OPENED or costs.open_seconds > 1.0
    return Figure(name, costs.open_seconds if judged else None, "s", 1.0, 0.1, note=note)


def _micro(seconds: float | None) -> float | None:
    return None if seconds is None else seconds / _MICRO


def _quality_table(found: CacheReport) -> RenderableType:
    columns = ["file", "calls", "tokens"]
    for budget in found.budgets:
        columns += [f"at {budget}", "drafted", "peer", "ratio"]
    means = [cell for budget in found.budgets for cell in ("", "", "", _number(found.mean_ratio(budget), 3))]
    rows = [_quality_cells(file, found.budgets) for file in found.files]
    return report.table(
        f"Tokens per step; vs {found.peer_source}", columns, [*rows, ("geometric mean", "", "", *means)]
    )


def _quality_cells(file: FileResult, budgets: Sequence[int]) -> list[str]:
    first = file.replays[budgets[0]]
    cells = [file.name, str(len(first.tokens)), str(sum(first.tokens))]
    for budget in budgets:
        replay = file.replays[budget]
        cells += [f"{replay.tokens_per_step:.3f}", f"{replay.drafted_per_step:.1f}"]
        cells += [_number(file.peer.get(budget), 2), _number(file.ratio(budget), 3)]
    return cells


def _calibration_table(found: CacheReport) -> RenderableType:
    budget = found.budgets[-1]
    title = (
        f"Calibration at budget {budget}: predicted/measured acceptance in percent, bins of equally many drafted nodes"
    )
    rows = (_calibration_cells(file.name, file.replays[budget]) for file in found.files)
    return report.table(title, ("file", *(str(number) for number in range(1, 11)), "worst"), rows)


def _calibration_cells(name: str, replay: Replay) -> list[str]:
    bins = [f"{100 * predicted:.1f}/{100 * measured:.1f}" for predicted, measured in calibration(replay)]
    return [name, *bins, *[""] * (10 - len(bins)), f"{100 * worst_calibration(replay):.1f}"]


def _timing_table(found: CacheReport) -> RenderableType:
    budget = found.budgets[-1]
    columns = ("file", "draft median, us", "p99", "extend, us/token", "close, us/token", "start, us")
    rows = (
        (file.name, *(f"{1e6 * seconds:.3g}" for seconds in _times(file.replays[budget]).values()))
        for file in found.files
    )
    return report.table(f"Processor time in the replay at budget {budget}", columns, rows)


def _times(replay: Replay) -> dict[str, float]:
    """Processor seconds per draft, per output token and per started request."""
    tokens = sum(replay.tokens)
    return {
        "draft_median": float(np.median(replay.draft_seconds)),
        "draft_p99": float(np.percentile(replay.draft_seconds, 99)),
        "extend_per_token": replay.extend_seconds / tokens,
        "close_per_token": replay.close_seconds / tokens,
        "start": float(np.mean(replay.open_seconds)),
    }


def _costs_table(costs: Costs) -> RenderableType:
    found = {
        "recorded": costs.recorded,
        "recorded, opened from disk": costs.opened,
        "the peer, recorded": costs.peer,
        "synthetic text, a control": costs.synthetic,
    }
    title = f"Processor time, us; {costs.disk_bytes:.1f} bytes a token in the database"
    columns = (
        "text",
        "cached tokens",
        "tree",
        "draft",
        "p99",
        "extend a token",
        "close",
        "new prompt a token",
        "known",
    )
    return report.table(title, columns, (_work_cells(name, work) for name, work in found.items() if work))


def _work_cells(name: str, work: Work) -> list[str]:
    seconds = (work.median, work.p99, work.extend, work.close, work.new_prompt, work.known_prompt)
    return [name, f"{work.cached_tokens:,}", f"{work.tree:.1f}", *(f"{1e6 * one:.3g}" for one in seconds)]


def _goal_cells(goal: Figure) -> tuple[str, ...]:
    bounds = (f"{goal.sign} {bound:g} {goal.unit}".rstrip() for bound in (goal.required, goal.aim))
    measured = "" if goal.value is None else str(goal)
    return (goal.name, measured, *bounds, goal.verdict, goal.note)


def _goal_data(goal: Figure) -> dict[str, Any]:
    fields = asdict(goal)
    return {"figure": fields.pop("name"), **fields, "verdict": goal.verdict}


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _file_data(file: FileResult) -> dict[str, Any]:
    return {
        "name": file.name,
        "budgets": {
            str(budget): {
                "tokens_per_step": replay.tokens_per_step,
                "drafted_per_step": replay.drafted_per_step,
                "peer": file.peer.get(budget),
                "ratio": file.ratio(budget),
                "calibration": calibration(replay),
                "seconds": _times(replay),
                "calls": {"tokens": replay.tokens, "steps": replay.steps, "drafted": replay.drafted},
            }
            for budget, replay in file.replays.items()
        },
    }


def calibration(replay: Replay, bins: int = 10) -> list[tuple[float, float]]:
    """(mean predicted, measured) acceptance of drafted nodes, in bins of equal size, sorted by prediction."""
    predicted, accepted = np.concatenate(replay.predicted), np.concatenate(replay.accepted)
    groups = np.array_split(np.argsort(predicted, kind="stable"), bins)
    return [(float(predicted[group].mean()), float(accepted[group].mean())) for group in groups if len(group)]


def worst_calibration(replay: Replay) -> float:
    """Largest distance between predicted and measured acceptance over the bins."""
    return max((abs(predicted - measured) for predicted, measured in calibration(replay)), default=0.0)
