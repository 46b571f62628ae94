"""Savings for a log of model calls: tokens per step and the share of steps that a draft helped, over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from agentspec.recordings.replay import Replay

_POINTS = 10  # at most so many windows of calls


@dataclass(frozen=True, slots=True)
class Savings:
    """Savings over a whole log; row i of the two `_over_time` fields covers calls `window * i` to `window * (i + 1)`.

    A step is one verification, which yields the accepted tokens and one more; without drafts each token takes a step.
    """

    calls: int
    tokens: int
    steps: int
    tokens_per_step: float
    drafted_per_step: float
    hit_rate: float  # share of steps with at least one accepted token
    saved: float  # share of the model's steps that would not have been taken
    window: int
    tokens_per_step_over_time: Sequence[float]
    hit_rate_over_time: Sequence[float]


def measure(replay: Replay) -> Savings:
    """The savings of a replay of at least one call."""
    calls, tokens, steps = len(replay.tokens), sum(replay.tokens), sum(replay.steps)
    window = -(-calls // _POINTS)
    return Savings(
        calls,
        tokens,
        steps,
        replay.tokens_per_step,
        replay.drafted_per_step,
        replay.hit_rate_by_call(calls)[0],
        1 - steps / tokens,
        window,
        replay.tokens_per_step_by_call(window),
        replay.hit_rate_by_call(window),
    )


def print_savings(savings: Savings, console: Console | None = None) -> None:
    table = Table(title="Over the calls seen", title_justify="left")
    for column in ("calls", "tokens per step", "steps with a hit"):
        table.add_column(column, justify="right")
    course = zip(savings.tokens_per_step_over_time, savings.hit_rate_over_time, strict=True)
    for number, (rate, hits) in enumerate(course):
        last = min(savings.calls, (number + 1) * savings.window)
        table.add_row(f"{number * savings.window + 1}-{last}", f"{rate:.2f}", f"{hits:.0%}")
    table.add_section()
    table.add_row("all", f"{savings.tokens_per_step:.2f}", f"{savings.hit_rate:.0%}")
    shown = console or Console()
    shown.print(table)
    shown.print(
        f"{savings.tokens} tokens in {savings.steps} steps of the model: {savings.saved:.0%} of its steps saved,"
        f" with {savings.drafted_per_step:.1f} tokens drafted a step.",
        highlight=False,
        soft_wrap=True,
    )
