"""The tables of the GPU benchmark, and whether its goals were met."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from agentspec.benchmarks.decode import OFF
from agentspec.benchmarks.decode import Table as Runs
from agentspec.benchmarks.forced import ON
from agentspec.benchmarks.gpu import CONTEXTS, SIZES, Figure, Report

JUDGED = "8b"  # the shape that the goals are for


def print_report(report: Report, console: Console) -> None:
    title = f"{report.shape}, random weights, {report.dtype} on {report.device}, attention {report.attention or 'none'}"
    console.print(f"{title}: {report.seconds:.0f} s")
    for name, holds in report.checks.items():
        console.print(f"  {'ok' if holds else 'FAILED'}: {name}")
    console.print(_times(report))
    for table in report.tables:
        console.print(_recorded(table))
    for figure in report.figures:
        console.print(f"  {figure.name}: {_value(figure)}{_goal(figure, report)}")
    for name in report.left_out:
        console.print(f"  left out: {name}")


def _times(report: Report) -> RichTable:
    rich = RichTable(title=f"ms of a verification on {report.device}", title_justify="left")
    for column in ("rows", *(f"{size} tokens" for size in SIZES)):
        rich.add_column(column, justify="right")
    for context in CONTEXTS:
        cells = (report.steps.get((context, size)) for size in SIZES)
        rich.add_row(str(context), *("not measured" if cell is None else f"{cell * 1e3:.2f}" for cell in cells))
    return rich


def _recorded(table: Runs) -> RichTable:
    rich = RichTable(title=f"{table.name}: forced targets, random weights", title_justify="left")
    for column in ("variant", "calls", "tok/s", "tokens/step"):
        rich.add_column(column, justify="left" if column == "variant" else "right")
    for way in (OFF, ON):
        steps = table.tokens_per_step(way) or 1.0
        rich.add_row(way, str(len(table.runs[way])), f"{table.total_speed(way):.1f}", f"{steps:.2f}")
    return rich


def _value(figure: Figure) -> str:
    return "not measured" if figure.value is None else f"{figure.value:.3g} {figure.unit}".rstrip()


def _goal(figure: Figure, report: Report) -> str:
    """Its goal and the verdict; goals are of one shape on a GPU, and no verdict on anything else."""
    bounds = [f"at least {figure.least:g}"] if figure.least is not None else []
    bounds += [f"at most {figure.most:g}"] if figure.most is not None else []
    if not bounds:
        return ""
    if not judged(report):
        return f" (goal on a GPU, shape {JUDGED}: {bounds[0]}; not judged here)"
    verdict = {True: "met", False: "missed", None: "undecided"}[figure.met]
    return f", goal {bounds[0]}: {verdict}"


def judged(report: Report) -> bool:
    return report.device != "CPU" and report.shape == JUDGED


def write_json(report: Report, path: Path, environment: dict[str, Any]) -> None:
    """Every figure with its goal, every time, every run of the recorded answers."""
    steps = [{"rows": rows, "tokens": size, "seconds": time} for (rows, size), time in report.steps.items()]
    tables = [{"name": table.name, "runs": {way: list(map(asdict, runs)) for way, runs in table.runs.items()}}
              for table in report.tables]  # fmt: skip
    plain = {name: getattr(report, name) for name in ("shape", "device", "dtype", "attention", "checks", "left_out")}
    figures = [asdict(figure) | {"met": figure.met if judged(report) else None} for figure in report.figures]
    written = {"environment": environment, **plain, "figures": figures, "steps": steps, "tables": tables}
    path.write_text(json.dumps(written | {"seconds": report.seconds}, indent=1))
