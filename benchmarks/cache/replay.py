"""The cache benchmark: replays recorded calls at several budgets, compares the peer, and measures costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from agentspec.benchmarks.cache import peer
from agentspec.benchmarks.cache.costs import Costs
from agentspec.benchmarks.cache.report import CacheReport, FileResult
from agentspec.benchmarks.report import Progress
from agentspec.recordings.formats import names_of
from agentspec.recordings.replay import replay_cache
from agentspec.recordings.traces import Encode, read_calls


def run_cache(
    paths: Sequence[Path],
    encode: Encode,
    *,
    calls: int,
    budgets: Sequence[int],
    costs: Callable[[Progress], Costs] | None = None,
    progress: Progress,
) -> CacheReport:
    """Replay the first `calls` calls of each file at every budget, then measure `costs`.

    Raises `ConfigurationError`.
    """
    files = []
    installed = peer.installed_version()
    for path, name in zip(paths, names_of(paths), strict=True):
        name = name.removesuffix(".jsonl.gz")
        progress(f"{name}: encoding")
        recorded = read_calls(path, encode, calls)
        result = FileResult(name)
        for budget in sorted(set(budgets)):
            progress(f"{name}: replaying {len(recorded)} calls at budget {budget}")
            result.replays[budget] = replay_cache(recorded, budget)
        for budget in budgets if installed else ():
            progress(f"{name}: the peer at budget {budget}")
            result.peer[budget] = peer.replay_peer(recorded, budget).tokens_per_step
        files.append(result)
    source = (
        f"arctic-inference {installed}, best tree, run here"
        if installed
        else "a peer that is not installed: pip install arctic-inference"
    )
    measured = costs(progress) if costs else None
    return CacheReport(files, sorted(budgets), source, measured)
