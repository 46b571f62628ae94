"""Prometheus metrics of tools that start early."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from agentspec.step.tool_report import ToolStatistics
from agentspec.tools.metrics import ToolCollector


def test_a_registry_tells_what_early_starts_of_each_tool_saved() -> None:
    totals, registry = ToolStatistics(), CollectorRegistry()
    registry.register(ToolCollector(totals))
    for what, seconds in (("call", 0.0), ("launch", 0.0), ("hit", 1.5), ("launch", 0.0), ("waste", 0.25)):
        totals.add("look", what, seconds)
    totals.add("peek", "launch", 0.0)
    totals.add("peek", "failed", 2.0)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"agentspec_tool_{name}_total", labels)

    assert value("calls", tool="look") == 1 and value("launches", tool="look") == 2
    ends = {outcome: value("early_results", tool="look", outcome=outcome) for outcome in ("hit", "waste", "stale")}
    assert ends == {"hit": 1, "waste": 1, "stale": 0}
    assert value("saved_seconds", tool="look") == 1.5 and value("wasted_seconds", tool="look") == 0.25
    assert value("early_results", tool="peek", outcome="failed") == 1 and value("wasted_seconds", tool="peek") == 2.0
    assert b"# TYPE agentspec_tool_launches_total counter" in generate_latest(registry)


def test_what_happens_after_a_scrape_is_in_the_next() -> None:
    totals, registry = ToolStatistics(), CollectorRegistry()
    registry.register(ToolCollector(totals))
    assert b"look" not in generate_latest(registry)
    totals.add("look", "launch", 0.0)
    assert b'agentspec_tool_launches_total{tool="look"} 1.0' in generate_latest(registry)
