"""The table of the agent benchmark, and whether it met its goals."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from agentspec.benchmarks.agent_loop import AgentReport
from agentspec.benchmarks.decode import COLD, TRANSFORMERS, Table
from agentspec.benchmarks.decode_report import Goal, print_goals


def goals_of(report: AgentReport) -> tuple[Goal, ...]:
    return Goal(COLD, TRANSFORMERS, 3.0), Goal(report.warm, TRANSFORMERS, 4.0)


def print_report(report: AgentReport, console: Console) -> None:
    console.print(_rich_table(report))
    print_goals(report.table, goals_of(report), console)


def _rich_table(report: AgentReport) -> RichTable:
    answers = report.table.runs[TRANSFORMERS]
    first, last = (sum(lengths[at] for lengths in report.prompt_tokens) / len(report.prompt_tokens) for at in (0, -1))
    tokens = sum(len(run.tokens) for run in answers) / len(answers)
    title = (
        f"{len(report.prompt_tokens)} sessions: prompts of {first:.0f} to {last:.0f} tokens, answers of {tokens:.0f}"
    )
    rich = RichTable(title=title, title_justify="left")
    for column in ("variant", "seconds a session", f"vs {TRANSFORMERS}", "tokens/step", f"same as {TRANSFORMERS}"):
        rich.add_column(column, justify="left" if column == "variant" else "right")
    for variant in report.table.runs:
        rich.add_row(*_cells(report.table, variant, len(report.prompt_tokens)))
    return rich


def _cells(table: Table, variant: str, sessions: int) -> tuple[str, ...]:
    runs, per_step = table.runs[variant], table.tokens_per_step(variant)
    return (
        variant,
        f"{sum(run.seconds for run in runs) / sessions:.1f}",
        str(table.ratio(variant, TRANSFORMERS)),
        f"{per_step:.2f}" if per_step else "",
        f"{table.identical(variant, TRANSFORMERS)}/{len(runs)}",
    )


def write_json(report: AgentReport, path: Path, environment: dict[str, Any]) -> None:
    """Every answer with its tokens and seconds, every prompt's length, every ratio with its interval."""
    table = report.table
    data = {
        "environment": environment,
        "prompt_tokens": report.prompt_tokens,
        "ratios": {variant: asdict(table.ratio(variant, TRANSFORMERS)) for variant in table.runs},
        "goals": [asdict(goal) | {"verdict": goal.verdict(table)} for goal in goals_of(report)],
        "runs": {variant: [asdict(run) for run in runs] for variant, runs in table.runs.items()},
    }
    path.write_text(json.dumps(data, indent=1))
