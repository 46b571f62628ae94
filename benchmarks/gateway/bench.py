"""Runs the measures of the gateway several times, each with processes of its own, and reports the medians."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import RenderableType

from agentspec.benchmarks import report
from agentspec.benchmarks.gateway.measures import MEASURES, PLACES, GatewayPlan, warm_up
from agentspec.benchmarks.gateway.processes import Bench, running
from agentspec.benchmarks.report import Figure, Progress
from agentspec.errors import ConfigurationError

QUICK = GatewayPlan(pairs=200, calls=1000, streams=100, ramp=1.0, stream_seconds=3.0, overload_seconds=4.0)


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure's name in the table, its unit, and its bounds, where it has any."""

    label: str
    unit: str
    required: float | None = None
    aim: float | None = None
    at_most: bool = True


GOALS = {
    "latency_p50": Goal("added latency, one at a time, p50", "ms", 1.0, 0.6),
    "latency_p99": Goal("added latency, one at a time, p99", "ms", 2.5, 1.5),
    "delivery_p50": Goal("streams: delivery of an event, p50", "ms"),
    "delivery_p99": Goal("streams: delivery of an event, p99", "ms", 100, 50),
    "event_processor": Goal("streams: processor time per event", "ms", 0.1, 0.04),
    "event_upstream": Goal("streams: the upstream's own per event", "ms"),
    "event_client": Goal("streams: the client's own per event", "ms"),
    "stream_memory": Goal("streams: memory growth", "MiB", 150, 80),
    "stream_failures": Goal("streams: failed", "", 0, 0),
    "goodput": Goal("overload: good answers, share of peak", "%", 80, 95, at_most=False),
    "shed": Goal("overload: refused by 429 or 503", ""),
    "failed": Goal("overload: failed in another way", "", 0, 0),
    "overload_p99": Goal("overload: good answers, p99", "ms"),
    "recovery": Goal("overload: seconds to recover", "s", 5, 1),
}
BY_CONNECTIONS = {
    "rate": Goal("calls per second", "/s", 800, 1500, at_most=False),
    "call_processor": Goal("processor time per call", "ms", 0.9, 0.5),
    "call_client": Goal("the client's own per call", "ms"),
    "call_upstream": Goal("the upstream's own per call", "ms"),
    "call_failures": Goal("failed calls", "", 0, 0),
}


@dataclass(slots=True)
class GatewayReport:
    """Each figure of each run."""

    plan: GatewayPlan
    runs: dict[str, list[float]] = field(default_factory=dict)

    def add(self, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self.runs.setdefault(name, []).append(value)

    def figures(self) -> list[Figure]:
        """The median of each figure over the runs, with the goal it has; the note tells the extremes."""
        return [_figure(_goal(name), values) for name, values in self.runs.items()]

    def show(self) -> Iterator[RenderableType]:
        columns = ("figure", "measured", "required", "aim", "verdict", "note")
        yield report.table("The gateway under load, two tenants", columns, map(_cells, self.figures()))

    def data(self) -> dict[str, Any]:
        return {
            "plan": asdict(self.plan),
            "runs": self.runs,
            "figures": [asdict(figure) | {"verdict": figure.verdict} for figure in self.figures()],
        }


def run_gateway(
    plan: GatewayPlan,
    *,
    measures: Sequence[str] = tuple(MEASURES),
    runs: int = 1,
    progress: Progress = lambda message: None,
) -> GatewayReport:
    """Run the named measures `runs` times.

    Raises `ConfigurationError` where the system cannot run or measure this, and `BenchmarkFailedError`.
    """
    found = GatewayReport(plan)
    for number in range(runs):
        for name in measures:
            progress(f"run {number + 1} of {runs}: {name}")
            with _processes(plan.streams if name == "streams" else 0) as bench:
                found.add(MEASURES[name](bench, plan))
    return found


def connections_of(text: str) -> tuple[int, ...]:
    """The numbers in "16,64". Raises `ConfigurationError` for anything else, and for zero or a repeated number."""
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() and int(part) for part in parts):
        raise ConfigurationError(f"{text!r} is not a list of numbers of connections: write for instance 16,64")
    numbers = tuple(int(part) for part in parts)
    if len(set(numbers)) < len(numbers) or max(numbers) > 10_000:
        raise ConfigurationError(f"{text!r}: name each number of connections once, at most 10000")
    return numbers


@contextmanager
def _processes(streams: int) -> Iterator[Bench]:
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder), streams=streams, places=PLACES) as bench,
    ):
        warm_up(bench)
        yield bench


def _goal(name: str) -> Goal:
    if name in GOALS:
        return GOALS[name]
    base, _, connections = name.rpartition("_")
    goal = BY_CONNECTIONS[base]
    return replace(goal, label=f"{goal.label}, {connections} connections")


def _figure(goal: Goal, values: Sequence[float]) -> Figure:
    note = f"{len(values)} runs, {min(values):.3g} to {max(values):.3g}" if len(values) > 1 else ""
    return Figure(goal.label, median(values), goal.unit, goal.required, goal.aim, goal.at_most, note)


def _cells(figure: Figure) -> tuple[str, ...]:
    bounds = ("" if bound is None else f"{figure.sign} {bound:g}" for bound in (figure.required, figure.aim))
    judged = figure.required is not None or figure.aim is not None
    return figure.name, str(figure), *bounds, figure.verdict if judged else "", figure.note
