"""The table of the KNN-LM benchmark, and whether it met its goal."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from agentspec.benchmarks.knn import OFF, ON, VARIANTS, KnnTable

COLUMNS = ("variant", "tok/s", "vs off", "same", "gamma", "decided", "batches saved", "model", "guess", "search")
REQUIRED, AIM = 1.2, 1.6
TRACED = 24  # searches of the stride trace that are shown


def print_table(table: KnnTable, console: Console) -> None:
    """Speed, where the time went, how good the guesses were, the bound, and one answer's strides."""
    tokens = sum(len(run.tokens) for run in table.runs[OFF])
    title = f"KNN-LM, {table.entries} entries: {len(table.runs[OFF])} prompts, {tokens} tokens"
    rich = RichTable(title=title, title_justify="left")
    for column in COLUMNS:
        rich.add_column(column, justify="left" if column == "variant" else "right")
    for name in VARIANTS:
        rich.add_row(name, *_row(table, name))
    console.print(rich)
    console.print(f"  bound, if searches cost nothing: {table.bound():.2f}x")
    speedup = table.speedup(ON)
    verdicts = f"required {REQUIRED}x: {speedup.verdict(REQUIRED)}; aim {AIM}x: {speedup.verdict(AIM)}"
    console.print(f"  {ON} / {OFF}: {speedup}, {verdicts}")
    strides = " ".join(map(str, table.runs[ON][0].took.strides[:TRACED]))
    console.print(f"  queries of each search, first prompt: {strides}")


def write_json(table: KnnTable, path: Path, environment: dict[str, Any]) -> None:
    """Every run with its tokens, seconds and strides; every ratio with its interval; the bound."""
    ratios = {name: asdict(table.speedup(name)) for name in VARIANTS}
    gammas = {name: table.gamma(name) for name in VARIANTS}
    runs = {name: [asdict(run) for run in runs] for name, runs in table.runs.items()}
    summary = {"entries": table.entries, "bound": table.bound(), "gamma": gammas, "ratios": ratios}
    path.write_text(json.dumps({"environment": environment, **summary, "runs": runs}, indent=1))


def _row(table: KnnTable, name: str) -> list[str]:
    runs = table.runs[name]
    tokens, seconds = sum(len(run.tokens) for run in runs), sum(run.seconds for run in runs)
    queries, searches = sum(run.took.queries for run in runs), sum(run.took.searches for run in runs)
    split = [sum(getattr(run.took, f"{part}_seconds") for run in runs) for part in ("model", "guess", "search")]
    return [
        f"{tokens / seconds:.1f}",
        str(table.speedup(name)),
        f"{table.same(name)}/{len(runs)}",
        "-" if name == OFF else f"{table.gamma(name):.2f}",
        f"{sum(run.took.decided for run in runs) / tokens:.0%}",
        f"{1 - searches / queries:.0%}" if queries else "-",
        *(f"{part / seconds:.0%}" for part in split),
    ]
