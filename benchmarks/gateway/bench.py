"""The measures of the gateway, run several times with processes of their own, and the medians of their figures.

Each measure drives the load client and returns its figures by name, in the units of `GOALS`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import RenderableType

from agentspec.benchmarks import report
from agentspec.benchmarks.gateway.processes import Bench, running
from agentspec.benchmarks.gateway.wire import Script, Target
from agentspec.benchmarks.report import Figure, Progress

MIB = 1 << 20
PLACES, PLACE_SECONDS = 16, 0.16  # the upstream whose capacity the overload exceeds
PLACED = Script("placed", 0, PLACE_SECONDS)
CAPACITY = PLACES / PLACE_SECONDS  # calls per second
PATIENCE = 10.0  # seconds after which a client of the overload gives up
MOST_CONNECTIONS = 8192  # of the client
RECOVERED = 2.0  # times the latency before the overload
SHED = ("429", "503")

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """The sizes of the measures.

    `pairs` calls are made one at a time to each side; `calls` at each number of `connections`; `streams` at once, each
    with an event `every` so many seconds, are measured for `stream_seconds`; the overload is `overload` times the
    upstream's capacity for `overload_seconds`.
    """

    pairs: int = 2000
    calls: int = 20_000
    connections: tuple[int, ...] = (16, 64)
    streams: int = 1000
    every: float = 0.2
    ramp: float = 5.0
    stream_seconds: float = 20.0
    overload: float = 5.0
    overload_seconds: float = 20.0


@dataclass(slots=True)
class UsedProcessor:
    """Processor time in seconds that the processes used between two moments."""

    gateway: float = 0.0
    upstream: float = 0.0


@contextmanager
def used(bench: Bench) -> Iterator[UsedProcessor]:
    """Fill in what the gateway and the upstream use inside the block."""
    usage = UsedProcessor()
    gateway, upstream = bench.gateway.processor(), bench.upstream.processor()
    yield usage
    usage.gateway, usage.upstream = bench.gateway.processor() - gateway, bench.upstream.processor() - upstream


def latency(bench: Bench, plan: GatewayPlan) -> Figures:
    """What the gateway adds to a call while nothing else runs, by calls made to it and to the upstream in turn."""
    one_tenant = Target(bench.gateway.target.port, bench.gateway.target.keys[:1])
    targets = {"direct": bench.upstream.target, "gateway": one_tenant}
    seconds = bench.client.do("turns", targets=targets, script=Script(), count=plan.pairs)
    return {
        f"latency_{share}": 1000 * (seconds["gateway"][share] - seconds["direct"][share]) for share in ("p50", "p99")
    }


def throughput(bench: Bench, plan: GatewayPlan) -> Figures:
    """Calls per second and processor time per call, not streamed, at each number of connections."""
    figures: Figures = {}
    for connections in plan.connections:
        with used(bench) as usage:
            result = _calls(bench, connections, plan.calls)
        good = result["statuses"].get("200", 0)
        made = sum(result["statuses"].values())  # fewer than planned where a connection broke, which ends the measure
        figures[f"rate_{connections}"] = good / result["elapsed"]
        figures[f"call_processor_{connections}"] = 1000 * usage.gateway / made
        figures[f"call_client_{connections}"] = 1000 * result["processor"] / made
        figures[f"call_upstream_{connections}"] = 1000 * usage.upstream / made
        figures[f"call_failures_{connections}"] = plan.calls - good
    return figures


def streams(bench: Bench, plan: GatewayPlan) -> Figures:
    """Many streams at once: how late events arrive, what one costs, and the memory that the streams take."""
    marks: dict[str, tuple[float, float, int, float]] = {}

    def marked(mark: dict[str, Any]) -> None:
        gateway = bench.gateway
        marks[mark["mark"]] = (gateway.processor(), bench.upstream.processor(), mark["events"], gateway.resident())

    before = bench.gateway.resident()
    sizes: dict[str, Any] = {"count": plan.streams, "every": plan.every, "ramp": plan.ramp}
    sizes["seconds"] = plan.stream_seconds
    result = bench.client.do("streams", marked=marked, target=bench.gateway.target, **sizes)
    steady, over = marks["steady"], marks["over"]
    events = over[2] - steady[2]
    return {
        "delivery_p50": 1000 * (result["delivery"]["p50"] or 0.0),
        "delivery_p99": 1000 * (result["delivery"]["p99"] or 0.0),
        "event_processor": 1000 * (over[0] - steady[0]) / events,
        "event_upstream": 1000 * (over[1] - steady[1]) / events,
        "event_client": 1000 * result["processor"] / result["events"],
        "stream_memory": (over[3] - before) / MIB,
        "stream_failures": plan.streams - result["statuses"].get("200", 0),
    }


def overload(bench: Bench, plan: GatewayPlan) -> Figures:
    """More calls than the upstream has places for: good answers against the peak, refusals, and the time to recover."""
    peak = arrivals(bench, CAPACITY, plan.overload_seconds)
    calm = arrivals(bench, CAPACITY / 2, 2.0)["p50"]
    flood = arrivals(bench, CAPACITY * plan.overload, plan.overload_seconds)
    recovery = _recovery(bench, RECOVERED * calm)
    statuses = flood["statuses"]
    return {
        "goodput": 100 * _good_rate(flood, plan.overload_seconds) / _good_rate(peak, plan.overload_seconds),
        "shed": sum(statuses.get(status, 0) for status in SHED),
        "failed": sum(count for status, count in statuses.items() if status not in ("200", *SHED)),
        "overload_p99": 1000 * (flood["p99"] or 0.0),
        "recovery": recovery,
    }


MEASURES: dict[str, Callable[[Bench, GatewayPlan], Figures]] = {
    "latency": latency,
    "throughput": throughput,
    "streams": streams,
    "overload": overload,
}


def warm_up(bench: Bench) -> None:
    """Let the gateway make its first calls, whose imports and connections belong to no measure."""
    _calls(bench, 8, 200)


def _calls(bench: Bench, connections: int, count: int) -> dict[str, Any]:
    target = bench.gateway.target
    return bench.client.do("calls", target=target, script=Script(), connections=connections, count=count)


def arrivals(
    bench: Bench, rate: float, seconds: float, script: Script = PLACED, patience: float = PATIENCE
) -> dict[str, Any]:
    sizes: dict[str, Any] = {"rate": rate, "seconds": seconds, "patience": patience, "connections": MOST_CONNECTIONS}
    return bench.client.do("arrivals", target=bench.gateway.target, script=script, **sizes)


def _good_rate(result: dict[str, Any], seconds: float) -> float:
    """Good answers per second while the load lasted, without the first second, in which the queue fills."""
    good: list[int] = result["good"]
    return sum(good[1:]) / max(1, len(good) - 1) if seconds > 1 else sum(good)


def _recovery(bench: Bench, limit: float) -> float:
    """Seconds after an overload until half the capacity is answered as fast as before, in windows of half a second."""
    started = time.monotonic()
    while time.monotonic() - started < 60:
        result = arrivals(bench, CAPACITY / 2, 0.5)
        if set(result["statuses"]) == {"200"} and result["p50"] <= limit:
            break
    return max(0.0, time.monotonic() - started - 0.5)


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
