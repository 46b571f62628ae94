"""Tables, JSON and a plot of the decode benchmark, and whether it met its goals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from agentspec.benchmarks.decode import COLD, OFF, SECOND, TRANSFORMERS, WARM_COUNTS, Table, warm_name


@dataclass(frozen=True, slots=True)
class Goal:
    """The median of a variant's speed over a baseline's must reach `least`, judged by the interval's lower bound."""

    variant: str
    baseline: str
    least: float

    def verdict(self, table: Table) -> str:
        return table.ratio(self.variant, self.baseline).verdict(self.least)


EDIT_GOALS = (
    Goal(OFF, TRANSFORMERS, 1.05),
    Goal(COLD, TRANSFORMERS, 2.6),
    Goal(warm_name(max(WARM_COUNTS)), TRANSFORMERS, 3.2),
    Goal(SECOND, TRANSFORMERS, 6.0),
)
CONTROL_GOALS = (Goal(COLD, OFF, 0.98),)


def goals_of(table: Table) -> tuple[Goal, ...]:
    return CONTROL_GOALS if table.name == "control" else EDIT_GOALS


def print_goals(table: Table, goals: Sequence[Goal], console: Console) -> None:
    for goal in goals:
        ratio = table.ratio(goal.variant, goal.baseline)
        console.print(f"  {goal.variant} / {goal.baseline}: {ratio}, goal {goal.least}x: {goal.verdict(table)}")


def baseline_of(table: Table) -> str:
    return TRANSFORMERS if TRANSFORMERS in table.runs else OFF


def print_tables(tables: Sequence[Table], console: Console) -> None:
    for table in tables:
        console.print(_rich_table(table))
        print_goals(table, goals_of(table), console)


def _rich_table(table: Table) -> RichTable:
    baseline = baseline_of(table)
    answers = table.runs[baseline]
    tokens = sum(len(run.tokens) for run in answers)
    title = f"{table.name}: {len(table.speeds(baseline))} prompts, {tokens} answer tokens"
    rich = RichTable(title=title, title_justify="left")
    for column in ("variant", "tok/s", f"vs {baseline}", "tokens/step", f"same as {OFF}"):
        rich.add_column(column, justify="left" if column == "variant" else "right")
    for variant in table.runs:
        rich.add_row(*_cells(table, variant, baseline))
    return rich


def _cells(table: Table, variant: str, baseline: str) -> tuple[str, ...]:
    per_step = table.tokens_per_step(variant)
    return (
        variant,
        f"{table.total_speed(variant):.1f}",
        str(table.ratio(variant, baseline)),
        f"{per_step:.2f}" if per_step else "",
        f"{table.identical(variant, OFF)}/{len(table.runs[variant])}",
    )


def write_json(tables: Sequence[Table], path: Path, environment: dict[str, Any]) -> None:
    """Every run with its tokens and seconds, every ratio with its interval: enough to redo each figure."""
    path.write_text(json.dumps({"environment": environment, "tables": [_as_dict(t) for t in tables]}, indent=1))


def _as_dict(table: Table) -> dict[str, Any]:
    baseline = baseline_of(table)
    return {
        "name": table.name,
        "baseline": baseline,
        "ratios": {variant: asdict(table.ratio(variant, baseline)) for variant in table.runs},
        "goals": [asdict(goal) | {"verdict": goal.verdict(table)} for goal in goals_of(table)],
        "runs": {variant: [asdict(run) for run in runs] for variant, runs in table.runs.items()},
    }


def write_plot(tables: Sequence[Table], path: Path) -> None:
    """Bars of the speed ratios with their intervals, one panel a prompt set. Needs matplotlib (extra `bench`)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(tables), 4), layout="constrained")
    for axes, table in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables, strict=True):
        ratios = {variant: table.ratio(variant, baseline_of(table)) for variant in table.runs}
        medians = [ratio.median for ratio in ratios.values()]
        errors = [[r.median - r.low for r in ratios.values()], [r.high - r.median for r in ratios.values()]]
        axes.barh(list(ratios), medians, xerr=errors, capsize=3)
        axes.invert_yaxis()
        axes.axvline(1.0, color="grey", linewidth=1)
        axes.set_title(table.name)
        axes.set_xlabel(f"speed vs {baseline_of(table)}")
    figure.savefig(path)
