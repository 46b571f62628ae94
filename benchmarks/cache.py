"""The cache benchmark: recorded calls replayed at several budgets, compared with the peer, and what it all costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentspec.benchmarks import peer
from agentspec.benchmarks.cache_costs import Costs
from agentspec.recordings.replay import Replay, geometric_mean, replay_cache
from agentspec.recordings.traces import Encode, EncodedCall, read_calls

Progress = Callable[[str], None]

CURVE = (1, 2, 4, 8, 16, 32, 64)
"""Budgets of the plot, besides those asked for."""


@dataclass(slots=True)
class FileResult:
    """One trace file: its replays and the peer's tokens per step, both by budget."""

    name: str
    replays: dict[int, Replay] = field(default_factory=dict)
    peer: dict[int, float] = field(default_factory=dict)

    def ratio(self, budget: int) -> float | None:
        """Tokens per step over the peer's; None where the peer has no figure."""
        known = self.peer.get(budget)
        return self.replays[budget].tokens_per_step / known if known else None


@dataclass(frozen=True, slots=True)
class CacheReport:
    files: Sequence[FileResult]
    budgets: Sequence[int]  # ascending
    peer_source: str  # where the peer's figures come from
    costs: Costs | None

    def ratios(self, budget: int) -> list[float]:
        """Tokens per step over the peer's, of the files that have a figure to compare with."""
        return [ratio for file in self.files if (ratio := file.ratio(budget)) is not None]

    def mean_ratio(self, budget: int) -> float | None:
        """Geometric mean over those files; None where there are none."""
        ratios = self.ratios(budget)
        return geometric_mean(ratios) if ratios else None


def run_cache(
    paths: Sequence[Path],
    encode: Encode,
    *,
    calls: int,
    budgets: Sequence[int],
    curve: bool = False,
    costs: Callable[[Progress], Costs] | None = None,
    progress: Progress,
) -> CacheReport:
    """Replay the first `calls` calls of each file at every budget (and at those of CURVE), then measure `costs`."""
    files = []
    installed = peer.installed_version()
    for path in paths:
        name = path.name.removesuffix(".jsonl.gz")
        progress(f"{name}: encoding")
        recorded = read_calls(path, encode, calls)
        result = FileResult(name)
        for budget in sorted({*budgets, *(CURVE if curve else ())}):
            progress(f"{name}: replaying {len(recorded)} calls at budget {budget}")
            result.replays[budget] = replay_cache(recorded, budget)
        for budget in budgets:
            progress(f"{name}: the peer at budget {budget}")
            if (figure := _peer(name, recorded, budget, calls, installed)) is not None:
                result.peer[budget] = figure
        files.append(result)
    source = f"arctic-inference {installed}, best tree, run here" if installed else peer.MEASURED_SOURCE
    return CacheReport(files, sorted(budgets), source, costs(progress) if costs else None)


def _peer(name: str, recorded: Sequence[EncodedCall], budget: int, calls: int, installed: str | None) -> float | None:
    if installed:
        return peer.replay_peer(recorded, budget).tokens_per_step
    return peer.measured(name, budget, calls)
