"""The table of the concurrency benchmark, and whether it met its goals."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from agentspec.benchmarks.concurrency import OFF_ALONE, OFF_AT_ONCE, ON_ALONE, ON_AT_ONCE
from agentspec.benchmarks.decode import Table
from agentspec.benchmarks.decode_report import Goal, print_goals

BASELINES = {OFF_ALONE: OFF_ALONE, OFF_AT_ONCE: OFF_ALONE, ON_ALONE: ON_ALONE, ON_AT_ONCE: ON_ALONE}
GOALS = (Goal(OFF_AT_ONCE, OFF_ALONE, 1.8), Goal(ON_AT_ONCE, ON_ALONE, 1.5))


def print_table(table: Table, console: Console) -> None:
    tokens = sum(len(run.tokens) for run in table.runs[OFF_ALONE])
    title = f"{table.name}: {len(table.runs[OFF_ALONE])} rounds, {tokens} answer tokens"
    rich = RichTable(title=title, title_justify="left")
    for column in ("variant", "tok/s in all", "vs one at a time", f"same as {OFF_ALONE}"):
        rich.add_column(column, justify="left" if column == "variant" else "right")
    for variant, baseline in BASELINES.items():
        same = f"{table.identical(variant, OFF_ALONE)}/{len(table.runs[variant])}"
        rich.add_row(variant, f"{table.total_speed(variant):.1f}", str(table.ratio(variant, baseline)), same)
    console.print(rich)
    print_goals(table, GOALS, console)


def write_json(table: Table, path: Path, environment: dict[str, Any]) -> None:
    """Every run with its tokens and seconds, every ratio with its interval."""
    ratios = {variant: asdict(table.ratio(variant, baseline)) for variant, baseline in BASELINES.items()}
    runs = {variant: [asdict(run) for run in runs] for variant, runs in table.runs.items()}
    path.write_text(json.dumps({"environment": environment, "ratios": ratios, "runs": runs}, indent=1))
