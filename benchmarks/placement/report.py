"""What a simulation counts, and how variants compare: every parameter, then a row for each policy and order."""

from __future__ import annotations

import json
import statistics
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from agentspec.benchmarks.placement.scenario import Order, Scenario
from agentspec.benchmarks.placement.workload import SimulatedSession

_TIMES = ("session_p50", "session_p95", "session_p99", "ttft_p50", "ttft_p95", "ttft_p99")
_SHARES = ("hits", "hits_of_ideal", "missed", "missed_by_waiting")
_HEADS = {
    "session_p50": "session s, p50",
    "session_p95": "p95",
    "session_p99": "p99",
    "ttft_p50": "TTFT ms, p50",
    "ttft_p95": "p95",
    "ttft_p99": "p99",
    "hits": "cached",
    "hits_of_ideal": "of ideal",
    "missed": "late",
    "missed_by_waiting": "by waiting",
}


class SimulationCounts:
    """Counts of one run. The first `warm_up` sessions are left out."""

    def __init__(self, warm_up: int, block_tokens: int) -> None:
        self._warm_up, self._block_tokens = warm_up, block_tokens
        self.session_seconds = array("d")
        self.first_token_seconds = array("f")
        self.deadlines = self.missed = 0
        self.missed_by_waiting = 0  # would have been in time if no call of theirs had waited: what an order can win
        self.prompt_tokens = self.hit_tokens = self.ideal_tokens = 0
        self.events = 0
        self.seconds = 0.0
        self._seen: set[int] = set()

    def first_token(self, session: SimulatedSession, now: float) -> None:
        """A call begins to stream."""
        ideal = self._ideal(session)
        if session.number < self._warm_up:
            return
        self.first_token_seconds.append(now - session.sent)
        self.prompt_tokens += session.hit + session.work
        self.hit_tokens += session.hit
        self.ideal_tokens += ideal

    def closed(self, session: SimulatedSession, now: float) -> None:
        """A session has its last answer."""
        if session.number < self._warm_up:
            return
        self.session_seconds.append(now - session.arrived)
        if session.deadline < float("inf"):
            self.deadlines += 1
            self.missed += now > session.deadline
            self.missed_by_waiting += session.deadline < now <= session.deadline + session.waited

    def figures(self) -> Mapping[str, float]:
        """The figures by name: seconds at percentiles, shares, and counts."""
        sessions = np.percentile(np.array(self.session_seconds), (50, 95, 99)) if self.session_seconds else [0.0] * 3
        first = (
            np.percentile(np.array(self.first_token_seconds), (50, 95, 99)) if self.first_token_seconds else [0.0] * 3
        )
        return {
            **{f"session_p{p}": float(value) for p, value in zip((50, 95, 99), sessions, strict=True)},
            **{f"ttft_p{p}": float(value) for p, value in zip((50, 95, 99), first, strict=True)},
            "hits": self.hit_tokens / max(1, self.prompt_tokens),
            "hits_of_ideal": self.hit_tokens / max(1, self.ideal_tokens),
            "missed": self.missed / max(1, self.deadlines),
            "missed_by_waiting": self.missed_by_waiting / max(1, self.deadlines),
            "makespan": self.seconds,
            "sessions": len(self.session_seconds),
            "calls": len(self.first_token_seconds),
        }

    def _ideal(self, session: SimulatedSession) -> int:
        """Tokens of the prompt that one engine with room for everything would have had."""
        shape, seen = session.shape, self._seen
        if session.position:
            ideal = shape.shared_tokens + session.keep
        else:
            ideal = sum(tokens for key, tokens in shape.shared if key in seen)
            seen.update(key for key, _ in shape.shared)
        return min(ideal - ideal % self._block_tokens, session.hit + session.work - 1)


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """A policy and an order, with the figures of each seed."""

    policy: str
    order: Order
    figures: list[Mapping[str, float]] = field(default_factory=list)

    def median(self, figure: str) -> float:
        return statistics.median(one[figure] for one in self.figures)

    def total(self, figure: str) -> float:
        return sum(one[figure] for one in self.figures)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All variants of one scenario, and what simulating them cost."""

    scenario: Scenario
    seeds: int
    variants: Sequence[PolicyRun]
    events: int
    processor_seconds: float

    def data(self) -> dict[str, Any]:
        """All figures, as JSON."""
        shared = {"policy", "order", "seed"}
        return {
            "scenario": self.scenario.model_dump(mode="json", exclude=shared),
            "seeds": [self.scenario.seed + number for number in range(self.seeds)],
            "variants": [
                {"policy": one.policy, "order": one.order, "figures": [dict(each) for each in one.figures]}
                for one in self.variants
            ],
            "events": self.events,
            "processor_seconds": round(self.processor_seconds, 2),
        }


def print_comparison(comparison: Comparison, console: Console) -> None:
    for line in parameters(comparison.scenario):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(_table(comparison))
    first = comparison.variants[0]
    console.print(
        f"Medians of {comparison.seeds} seeds, counts in all; {first.total('sessions'):.0f} sessions and"
        f" {first.total('calls'):.0f} calls counted a row. {comparison.events} events in"
        f" {comparison.processor_seconds:.1f} s of processor time.",
        highlight=False,
        soft_wrap=True,
    )


def write_json(comparison: Comparison, path: Path) -> None:
    path.write_text(json.dumps(comparison.data(), indent=1))


def parameters(scenario: Scenario) -> Iterator[str]:
    """Every parameter that the rows share, as `name = value`."""
    values = scenario.model_dump(exclude={"policy", "order", "costs"})
    yield ", ".join(f"{name} = {value:.6g}" for name, value in values.items())
    yield "costs: " + ", ".join(f"{name} = {value:.6g}" for name, value in scenario.costs.model_dump().items())


def _table(comparison: Comparison) -> Table:
    table = Table()
    for name in ("policy", "order"):
        table.add_column(name, no_wrap=True)
    for name in (*_TIMES, *_SHARES):
        table.add_column(_HEADS[name], justify="right")
    for variant in comparison.variants:
        table.add_row(variant.policy, variant.order, *_cells(variant))
    return table


def _cells(variant: PolicyRun) -> Iterator[str]:
    for name in _TIMES:
        seconds = variant.median(name)
        yield f"{1000 * seconds:.0f}" if name.startswith("ttft") else f"{seconds:.1f}"
    for name in _SHARES:
        yield f"{variant.median(name):.1%}"
