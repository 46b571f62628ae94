"""The cache benchmark: replays recorded calls at several budgets, compares the peer, and measures costs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from agentspec.benchmarks.cache import peer
from agentspec.benchmarks.cache.costs import Costs
from agentspec.benchmarks.cache.late import measure_late
from agentspec.benchmarks.cache.report import CacheReport, FileResult
from agentspec.benchmarks.cache.sglang_peer import SglangFigures, compare_with_sglang, compile_corpus
from agentspec.benchmarks.cache.tenants import Tenancy
from agentspec.benchmarks.report import Progress
from agentspec.recordings.formats import names_of
from agentspec.recordings.replay import replay_cache
from agentspec.recordings.traces import Encode, EncodedCall, read_calls

SGLANG_WIDTHS = (12, 32)
"""SGLang's default and a wide tree, in tokens that it verifies."""

CURVE = (1, 2, 4, 8, 16, 32, 64)
"""Further budgets, for the plot."""


def run_cache(
    paths: Sequence[Path],
    encode: Encode,
    *,
    calls: int,
    budgets: Sequence[int],
    curve: bool = False,
    costs: Callable[[Progress], Costs] | None = None,
    tenancy: Callable[[Progress], Tenancy] | None = None,
    late: Sequence[int] = (),
    sglang: Path | None = None,
    progress: Progress,
) -> CacheReport:
    """Replay the first `calls` calls of each file at every budget, then measure `costs` and `tenancy`.

    With `curve`, budgets are those of CURVE too. Chains of each number of tokens in `late` are drafted late, too. With
    `sglang`, the folder of the `sglang` package, its n-gram corpus is a second peer. Raises `ConfigurationError`.
    """
    files = []
    installed = peer.installed_version()
    compare = _sglang_comparison(sglang)
    for path, name in zip(paths, names_of(paths), strict=True):
        name = name.removesuffix(".jsonl.gz")
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
        for tokens in late:
            progress(f"{name}: drafting {tokens} tokens late")
            result.late.append(measure_late(recorded, tokens))
        for width in SGLANG_WIDTHS if sglang else ():
            progress(f"{name}: SGLang's corpus, {width} tokens")
            result.sglang += compare(recorded, width)
        files.append(result)
    source = f"arctic-inference {installed}, best tree, run here" if installed else peer.MEASURED_SOURCE
    measured = costs(progress) if costs else None
    return CacheReport(files, sorted(budgets), source, measured, tenancy(progress) if tenancy else None)


def _sglang_comparison(package: Path | None) -> Callable[[Sequence[EncodedCall], int], list[SglangFigures]]:
    """A function that compares the cache with SGLang's corpus, which is compiled and loaded now."""
    if package is None:
        return lambda calls, width: []
    with tempfile.TemporaryDirectory(prefix="agentspec-bench-") as folder:
        library = compile_corpus(package, Path(folder))
    return lambda calls, width: list(compare_with_sglang(calls, width, library))


def _peer(name: str, recorded: Sequence[EncodedCall], budget: int, calls: int, installed: str | None) -> float | None:
    if installed:
        return peer.replay_peer(recorded, budget).tokens_per_step
    return peer.measured(name, budget, calls)
