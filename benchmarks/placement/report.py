"""Prints a comparison: every parameter, then a row for each policy and order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agentspec.benchmarks.placement.comparison import Comparison, PolicyRun
from agentspec.benchmarks.placement.scenario import Scenario

_TIMES = ("session_p50", "session_p95", "session_p99", "ttft_p50", "ttft_p95", "ttft_p99")
_SHARES = ("hits", "hits_of_ideal", "missed", "missed_by_waiting")
_SEVERAL = ("agreed",)  # shares that mean something with several gateways only
_COUNTS = ("cut", "retried", "lost")
_HEADS = {
    "session_p50": "session s, p50",
    "session_p95": "p95",
    "session_p99": "p99",
    "ttft_p50": "TTFT ms, p50",
    "ttft_p95": "p95",
    "ttft_p99": "p99",
    "hits": "cached",
    "hits_of_ideal": "of ideal",
    "missed": "late",
    "missed_by_waiting": "by waiting",
    "agreed": "agreed",
    "cut": "cut",
    "retried": "retried",
    "lost": "lost",
}


def print_comparison(comparison: Comparison, console: Console) -> None:
    for line in parameters(comparison.scenario):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(_table(comparison))
    first = comparison.variants[0]
    console.print(
        f"Medians of {comparison.seeds} seeds, counts in all; {first.total('sessions'):.0f} sessions and"
        f" {first.total('calls'):.0f} calls counted a row. {comparison.events} events in"
        f" {comparison.processor_seconds:.1f} s of processor time.",
        highlight=False,
        soft_wrap=True,
    )


def write_json(comparison: Comparison, path: Path) -> None:
    path.write_text(json.dumps(comparison.data(), indent=1))


def parameters(scenario: Scenario) -> Iterator[str]:
    """Every parameter that the rows share, as `name = value`."""
    values = scenario.model_dump(exclude={"policy", "order", "costs"})
    yield ", ".join(f"{name} = {value:.6g}" for name, value in values.items())
    yield "costs: " + ", ".join(f"{name} = {value:.6g}" for name, value in scenario.costs.model_dump().items())


def _table(comparison: Comparison) -> Table:
    shares = _SHARES + (_SEVERAL if comparison.scenario.gateways > 1 else ())
    counts = _COUNTS if comparison.scenario.kill_every else ()
    table = Table()
    for name in ("policy", "order"):
        table.add_column(name, no_wrap=True)
    for name in (*_TIMES, *shares, *counts):
        table.add_column(_HEADS[name], justify="right")
    for variant in comparison.variants:
        table.add_row(
            variant.policy, variant.order, *_cells(variant, shares), *(f"{variant.total(one):.0f}" for one in counts)
        )
    return table


def _cells(variant: PolicyRun, shares: Sequence[str]) -> Iterator[str]:
    for name in _TIMES:
        seconds = variant.median(name)
        yield f"{1000 * seconds:.0f}" if name.startswith("ttft") else f"{seconds:.1f}"
    for name in shares:
        yield f"{variant.median(name):.1%}"
