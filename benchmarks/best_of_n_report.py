"""The tables of the best-of-N benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from agentspec.benchmarks.best_of_n import Cost, speed_ratio
from agentspec.benchmarks.best_of_n_contest import BUDGETS, IN_TURN, SIDE_BY_SIDE, Contest, Standing

MIDDLE = 16  # budget of the figures that are told for one budget alone
SIZES = (1, 8, 16, 32)


def print_report(contests: list[Contest], console: Console) -> None:
    for contest in contests:
        for order in (SIDE_BY_SIDE, IN_TURN):
            console.print(_table(contest, order))
    _print_costs(contests[0], console)


def _table(contest: Contest, order: str) -> Table:
    title = f"temperature {contest.temperature:g}, {order}: {contest.questions} questions, {contest.tokens} tokens"
    table = Table(title=title, title_justify="left")
    table.add_column("drafter")
    heads = [f"tokens/step at {budget}" for budget in BUDGETS]
    heads += ["accepted", *(f"speed, {name}" for name in contest.machines), "draft, learn (us)"]
    for head in heads:
        table.add_column(head, justify="right")
    for standing in contest.standings:
        if standing.order == order:
            table.add_row(standing.name, *_cells(contest, standing))
    return table


def _cells(contest: Contest, standing: Standing) -> list[str]:
    middle, baseline = standing.budgets[MIDDLE], contest.baseline(standing.order)
    speeds = []
    for name, outcome in standing.governed.items():
        ratio, low, high = speed_ratio(outcome, baseline.governed[name])
        speeds.append(f"{outcome.speed:.2f}x, {ratio:.3f} [{low:.3f}, {high:.3f}]")
    return [
        *(f"{standing.budgets[budget].tokens_per_step:.2f}" for budget in BUDGETS),
        f"{middle.acceptance:.2f}",
        *speeds,
        f"{middle.draft_microseconds:.0f}, {middle.learn_microseconds:.0f}",
    ]


def _print_costs(contest: Contest, console: Console) -> None:
    for name, machine in contest.machines.items():
        for what, cost in (("a forward", machine.forward), ("ranking", machine.ranking)):
            told = ", ".join(f"{size}: {value:.3f}" for size, value in _costs(cost).items())
            console.print(f"{name}: cost of {what} by its tokens, in forwards of one: {told}")


def _costs(cost: Cost) -> dict[int, float]:
    return dict(zip(SIZES, cost(np.array(SIZES, dtype=np.int64)).tolist(), strict=True))


def write_json(contests: list[Contest], path: Path, environment: dict[str, Any]) -> None:
    """Every figure of the tables."""
    data = {"environment": environment, "contests": [_plain(contest) for contest in contests]}
    path.write_text(json.dumps(data, indent=1))


def _plain(contest: Contest) -> dict[str, Any]:
    return {
        "temperature": contest.temperature,
        "questions": contest.questions,
        "tokens": contest.tokens,
        "forward_costs": {name: _costs(machine.forward) for name, machine in contest.machines.items()},
        "ranking_costs": {name: _costs(machine.ranking) for name, machine in contest.machines.items()},
        "standings": [_standing(contest, one) for one in contest.standings],
    }


def _standing(contest: Contest, one: Standing) -> dict[str, Any]:
    baseline = contest.baseline(one.order)
    return {
        "name": one.name,
        "order": one.order,
        "budgets": {
            budget: {
                "tokens_per_step": outcome.tokens_per_step,
                "nodes_per_step": outcome.nodes_per_step,
                "acceptance": outcome.acceptance,
                "draft_microseconds": outcome.draft_microseconds,
                "learn_microseconds": outcome.learn_microseconds,
            }
            for budget, outcome in one.budgets.items()
        },
        "governed": {
            name: {
                "speed": outcome.speed,
                "nodes_per_step": outcome.nodes_per_step,
                "ratio": speed_ratio(outcome, baseline.governed[name]),
            }
            for name, outcome in one.governed.items()
        },
    }
