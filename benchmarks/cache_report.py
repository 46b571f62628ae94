"""Tables, JSON and a plot of the cache benchmark."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from agentspec.benchmarks.cache import CacheReport, FileResult
from agentspec.benchmarks.cache_costs import Costs
from agentspec.benchmarks.cache_goals import Goal, goals
from agentspec.recordings.replay import Replay

_WINDOW = 50  # calls per point of the plot


def print_report(report: CacheReport, console: Console) -> None:
    console.print(_quality_table(report))
    console.print(_calibration_table(report))
    console.print(_timing_table(report))
    if report.costs:
        console.print(_costs_table(report.costs))
    console.print(_goals_table(goals(report)))


def _quality_table(report: CacheReport) -> Table:
    table = _table(f"Tokens per step; vs {report.peer_source}", "file", "calls", "tokens")
    for budget in report.budgets:
        for column in (f"at {budget}", "drafted", "peer", "ratio"):
            table.add_column(column, justify="right")
    for file in report.files:
        first = file.replays[report.budgets[0]]
        cells = [cell for budget in report.budgets for cell in _quality_cells(file, budget)]
        table.add_row(file.name, str(len(first.tokens)), str(sum(first.tokens)), *cells)
    means = [("", "", "", _number(report.mean_ratio(budget), 3)) for budget in report.budgets]
    table.add_row("geometric mean", "", "", *(cell for cells in means for cell in cells))
    return table


def _quality_cells(file: FileResult, budget: int) -> tuple[str, ...]:
    replay = file.replays[budget]
    return (
        f"{replay.tokens_per_step:.3f}",
        f"{replay.drafted_per_step:.1f}",
        _number(file.peer.get(budget), 2),
        _number(file.ratio(budget), 3),
    )


def _calibration_table(report: CacheReport) -> Table:
    budget = report.budgets[-1]
    title = (
        f"Calibration at budget {budget}: predicted/measured acceptance in percent, bins of equally many drafted nodes"
    )
    table = _table(title, "file", *(str(number) for number in range(1, 11)), "worst")
    for file in report.files:
        replay = file.replays[budget]
        bins = [f"{100 * predicted:.1f}/{100 * measured:.1f}" for predicted, measured in replay.calibration()]
        table.add_row(file.name, *bins, *[""] * (10 - len(bins)), f"{100 * replay.worst_calibration():.1f}")
    return table


def _timing_table(report: CacheReport) -> Table:
    budget = report.budgets[-1]
    columns = ("draft median, us", "p99", "extend, us/token", "close, us/token", "start, us/prompt token")
    table = _table(f"Time in the replay at budget {budget}", "file", *columns)
    for file in report.files:
        times = _times(file.replays[budget])
        table.add_row(file.name, *(f"{1e6 * seconds:.3g}" for seconds in times.values()))
    return table


def _times(replay: Replay) -> dict[str, float]:
    """Seconds: per draft, per output token, per prompt token."""
    tokens = sum(replay.tokens)
    return {
        "draft_median": float(np.median(replay.draft_seconds)),
        "draft_p99": float(np.percentile(replay.draft_seconds, 99)),
        "extend_per_token": replay.extend_seconds / tokens,
        "close_per_token": replay.close_seconds / tokens,
        "start_per_prompt_token": replay.open_seconds / max(1, replay.prompt_tokens),
    }


def _costs_table(costs: Costs) -> Table:
    table = _table("Further costs (synthetic text), without a goal", "figure", "measured")
    busy = costs.draft_while_inserting
    rows = {
        "recording an output token: learning, session, shared past": f"{1e6 * costs.record:.2f} us",
        "longest draft, cache at rest": f"{1e3 * costs.draft.longest:.2f} ms",
        "draft while another thread records, median / p99 / longest": (
            f"{1e6 * busy.median:.1f} us / {1e6 * busy.p99:.0f} us / {1e3 * busy.longest:.2f} ms"
        ),
        "bytes on disk per token": f"{costs.disk_bytes:.1f}",
        f"open {costs.opened_tokens:,} tokens until the first draft": f"{costs.open_seconds:.2f} s",
    }
    for figure, measured in rows.items():
        table.add_row(figure, measured)
    return table


def _goals_table(judged: list[Goal]) -> Table:
    table = _table("Goals", "figure", "measured", "required", "aim", "verdict", "note")
    for goal in judged:
        sign = "<=" if goal.at_most else ">="
        bounds = (f"{sign} {bound:g} {goal.unit}".rstrip() for bound in (goal.required, goal.aim))
        measured = "" if goal.value is None else f"{goal.value:.3g} {goal.unit}".rstrip()
        table.add_row(goal.figure, measured, *bounds, goal.verdict, goal.note)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("file", "figure", "note", "verdict") else "right")
    return table


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def write_json(report: CacheReport, path: Path, environment: dict[str, Any]) -> None:
    """Everything that the tables show, and the counts of every call."""
    data = {
        "environment": environment,
        "peer": report.peer_source,
        "files": [_file_dict(file) for file in report.files],
        "costs": asdict(report.costs) if report.costs else None,
        "goals": [asdict(goal) | {"verdict": goal.verdict} for goal in goals(report)],
    }
    path.write_text(json.dumps(data, indent=1))


def _file_dict(file: FileResult) -> dict[str, Any]:
    return {
        "name": file.name,
        "budgets": {
            str(budget): {
                "tokens_per_step": replay.tokens_per_step,
                "drafted_per_step": replay.drafted_per_step,
                "peer": file.peer.get(budget),
                "ratio": file.ratio(budget),
                "calibration": replay.calibration(),
                "seconds": _times(replay),
                "calls": {"tokens": replay.tokens, "steps": replay.steps, "drafted": replay.drafted},
            }
            for budget, replay in file.replays.items()
        },
    }


def write_plot(report: CacheReport, path: Path) -> None:
    """Tokens per step against the budget, and against the calls seen. Needs matplotlib (extra `bench`)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    by_budget, by_call = figure.subplots(1, 2)
    for file in report.files:
        budgets = list(file.replays)
        by_budget.plot(budgets, [file.replays[b].tokens_per_step for b in budgets], marker="o", label=file.name)
        points = file.replays[report.budgets[-1]].tokens_per_step_by_call(_WINDOW)
        by_call.plot([_WINDOW * (number + 1) for number in range(len(points))], points)
    by_budget.set_xscale("log", base=2)
    by_budget.set_xlabel("budget, drafted tokens")
    by_budget.set_ylabel("tokens per step")
    by_budget.legend(fontsize="small")
    by_call.set_xlabel(f"calls seen (budget {report.budgets[-1]}, {_WINDOW} calls a point)")
    figure.savefig(path)
