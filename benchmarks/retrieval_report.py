"""Tables, JSON and a plot of the retrieval benchmark, and whether it met its goals."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from agentspec.benchmarks.retrieval import SEQUENTIAL, SPECULATIVE, Case, Check, Goal, Point, Report
from agentspec.speculation.stride import expected, latency, one_by_one, os3

SAVED_REQUIRED, SAVED_AIM = 0.5, 0.65
NEAR_BOUND = 0.9


def print_report(report: Report, console: Console) -> None:
    console.print(f"a round of sequential retrieval without its search: {report.round_seconds:.3f} s")
    console.print(_goals(report.cases))
    console.print(
        f"batches saved at fixed stride 3: {report.saved:.0%} (required {SAVED_REQUIRED:.0%}, aim {SAVED_AIM:.0%},"
        f" hit rate {report.saved_gamma:.2f}): {'met' if report.saved >= SAVED_REQUIRED else 'MISSED'}"
    )
    console.print(_times(report.cases))
    if report.points:
        console.print(_sweep(report.points))


def _goals(cases: Sequence[Case]) -> Table:
    table = Table(title="speculative over sequential retrieval", title_justify="left")
    for column in ("case", "of", "measured", "required", "aim", "bound", "of bound", "gamma", "same answers", ""):
        table.add_column(column, justify="left" if column in ("case", "of") else "right")
    for case in cases:
        for goal in case.goals:
            table.add_row(*_cells(case, goal))
    return table


def _cells(case: Case, goal: Goal) -> tuple[str, ...]:
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


def _times(cases: Sequence[Case]) -> Table:
    table = Table(title="where the time went, and the strides", title_justify="left")
    parts = ("generate", "rolled_back", "retrieve", "verify", "encode")
    for column in ("case", "variant", "seconds", *parts, "queries", "batches", "strides"):
        table.add_column(column, justify="left" if column in ("case", "variant", "strides") else "right")
    for case in cases:
        for variant, runs in case.runs.items():
            shares = case.shares(variant)
            table.add_row(
                case.name,
                variant,
                f"{sum(run.seconds for run in runs) / len(runs):.2f}",
                *(f"{shares[part]:.0%}" for part in parts),
                str(sum(run.account.queries for run in runs)),
                str(sum(run.account.batches for run in runs)),
                _strides(case, variant) if variant != SEQUENTIAL else "",
            )
    return table


def _strides(case: Case, variant: str) -> str:
    """How often each stride was taken; 0 is a document that was waited for."""
    counts = Counter(stride for run in case.runs[variant] for stride in run.account.strides)
    return ", ".join(f"{count} of {stride}" for stride, count in sorted(counts.items()))


def _sweep(points: Sequence[Point]) -> Table:
    table = Table(title="speed-up by the knowledge base's delay", title_justify="left")
    for column in ("delay", "measured", "bound", "OS3's formula", "gamma"):
        table.add_column(column, justify="right")
    for point in points:
        theory = published(point.generate, point.retrieve, point.gamma)
        cells = (point.speedup, point.bound, theory, point.gamma)
        table.add_row(f"{1000 * point.delay:g} ms", *(f"{cell:.2f}" for cell in cells))
    return table


def published(speak: float, ask: float, gamma: float) -> float:
    """The speed-up that the paper's formula gives at its best stride with asynchronous verification."""
    stride = os3(speak, ask, gamma, asynchronous=True)
    seconds = latency(stride, speak, ask, gamma, asynchronous=True) / expected(stride, gamma)
    return one_by_one(speak, ask) / seconds


def print_check(found: Check, console: Console) -> None:
    for kind, count in found.compared.items():
        console.print(f"{kind}: {count} answers compared")
    for line in found.differ:
        console.print(f"  differs: {line}")
    console.print(f"{len(found.differ)} of {sum(found.compared.values())} answers differ")


def write_json(report: Report, path: Path, environment: dict[str, Any]) -> None:
    """Every run with its tokens, seconds and account: enough to redo each figure."""
    cases = [asdict(case) | {"figures": _figures(case)} for case in report.cases]
    path.write_text(json.dumps({"environment": environment, **asdict(report), "cases": cases}, indent=1))


def _figures(case: Case) -> dict[str, Any]:
    return {
        "goals": [asdict(goal) | {"ratio": asdict(case.ratio(goal))} for goal in case.goals],
        "bound": case.bound(),
        "gamma": case.gamma(),
        "round": dict(zip(("generate", "retrieve", "encode"), case.costs(), strict=True)),
        "same": {variant: case.same(variant) for variant in case.runs},
    }


def write_plot(report: Report, path: Path) -> None:
    """Speed-up against the knowledge base's delay: measured, the bound and the paper's formula. Needs matplotlib."""
    from matplotlib.figure import Figure

    points = report.points
    speak = float(np.mean([point.generate for point in points]))
    gamma = float(np.mean([point.gamma for point in points]))
    delays = np.geomspace(min(p.delay for p in points), max(p.delay for p in points), 50)
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(delays, [published(speak, ask, gamma) for ask in delays], label=f"OS3's formula, gamma {gamma:.2f}")
    axes.plot([p.delay for p in points], [p.bound for p in points], "--", label="free verification, as measured")
    axes.plot([p.delay for p in points], [p.speedup for p in points], "o-", label=SPECULATIVE)
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("delay of the knowledge base (s)")
    axes.set_ylabel("times faster than sequential retrieval")
    axes.legend()
    figure.savefig(path)
