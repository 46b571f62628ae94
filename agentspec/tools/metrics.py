"""Prometheus metrics of tools that start early, for the process of an agent; the gateway runs no tools."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from agentspec.step.tool_report import ToolStatistics, statistics

_OUTCOMES = {"hit": "hits", "waste": "wasted", "stale": "stale", "failed": "failed"}
_TOTALS = {
    "calls": ("agentspec_tool_calls", "Calls that models made of tools that may start early"),
    "launches": ("agentspec_tool_launches", "Early starts of tools"),
    "seconds_saved": ("agentspec_tool_saved_seconds", "Seconds that agents did not wait, because of hits"),
    "wasted_seconds": ("agentspec_tool_wasted_seconds", "Seconds that tools ran early for nothing"),
}


class ToolCollector(Collector):
    """What `report()` says of tools, for a registry of your own: `REGISTRY.register(ToolCollector())`.

    The labels are names of tools and, of `agentspec_tool_early_results_total`, how early starts ended: `hit`, `waste`,
    `stale` or `failed`. Those still running, or waiting for their call, have no outcome yet.
    """

    def __init__(self, totals: ToolStatistics = statistics) -> None:
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        rows = self._totals.rows()
        for field, (name, meaning) in _TOTALS.items():
            family = CounterMetricFamily(name, meaning, labels=("tool",))
            for row in rows:
                family.add_metric([row.tool], getattr(row, field))
            yield family
        ended = CounterMetricFamily(
            "agentspec_tool_early_results", "Early starts by how they ended", labels=("tool", "outcome")
        )
        for row in rows:
            for outcome, field in _OUTCOMES.items():
                ended.add_metric([row.tool, outcome], getattr(row, field))
        yield ended
