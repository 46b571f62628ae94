"""Tables and JSON of the vLLM benchmark, and whether it met its goals."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentspec.benchmarks.stats import MIN_PAIRS
from agentspec.benchmarks.vllm import ARCTIC, COLD, CONTROL, CUSTOM_CLASS, NONE, PLUGIN, RESTARTED, WARM, Report
from agentspec.benchmarks.vllm_drafting import DraftingCost

Goal = tuple[tuple[str, str], tuple[str, str], float]

GOALS: tuple[Goal, ...] = tuple(
    goal
    for ours in (PLUGIN, CUSTOM_CLASS)
    for goal in (
        ((COLD, ours), (COLD, ARCTIC), 1.0),
        ((WARM, ours), (WARM, ARCTIC), 1.05),
        ((RESTARTED, ours), (WARM, ours), 0.95),
        ((CONTROL, ours), (CONTROL, NONE), 0.98),
    )
)
DRAFTING_MS = 0.4


def print_report(report: Report, drafting: DraftingCost, console: Console) -> None:
    for part, servers in report.answers.items():
        console.print(_table(report, part, list(servers)))
    for (part, server), (base_part, baseline), least in GOALS:
        if baseline not in report.answers.get(base_part, {}) or len(report.answers[part][server]) < MIN_PAIRS:
            continue
        ratio = report.ratio((part, server), (base_part, baseline))
        console.print(f"  {server} {part} / {baseline} {base_part}: {ratio}, goal {least}x: {ratio.verdict(least)}")
    verdict = "met" if drafting.median_ms <= DRAFTING_MS else "missed"
    console.print(
        f"  drafting a step of {drafting.requests} requests, 1 M cached tokens: {drafting.median_ms:.2f} ms median,"
        f" {drafting.p99_ms:.2f} ms p99, goal {DRAFTING_MS} ms: {verdict}"
    )


def _table(report: Report, part: str, servers: list[str]) -> Table:
    count = len(report.answers[part][servers[0]])
    table = Table(title=f"{part}: {count} answers", title_justify="left")
    for column in ("server", "tok/s", "tokens/step", "drafts accepted", "drafting ms", f"same as {NONE}"):
        table.add_column(column, justify="left" if column == "server" else "right")
    for server in servers:
        accepted, drafting = report.acceptance.get(server), report.drafting_ms.get(server)
        table.add_row(
            server,
            f"{report.speed(part, server):.1f}",
            f"{report.tokens_per_step(part, server):.2f}",
            "-" if accepted is None else f"{accepted:.0%}",
            "-" if drafting is None else f"{drafting:.2f}",
            "-" if part == CONTROL else f"{report.identical(part, server)} of {count}",
        )
    return table


def write_json(report: Report, drafting: DraftingCost, path: Path, environment: dict[str, Any]) -> None:
    data = {"environment": environment, "drafting": asdict(drafting), **asdict(report)}
    path.write_text(json.dumps(data, indent=1), encoding="utf-8")
