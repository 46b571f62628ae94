"""Metrics of several processes, added up."""

from __future__ import annotations

from agentspec.telemetry.metrics import Metrics
from agentspec.telemetry.metrics_sum import MetricsSum, dump
from agentspec.telemetry.samples import TenantSample


def one(count: int) -> Metrics:
    metrics = Metrics(version="1", models=["m"], tenants=lambda: [TenantSample("a", count, 0, count)])
    for _ in range(count):
        metrics.request("/x", "m", "ok", 0.02)
    metrics.in_flight.inc(count)
    return metrics


def sums(*added: tuple[Metrics, bool]) -> dict[str, float]:
    total = MetricsSum()
    for metrics, ended in added:
        total.add(dump(metrics.registry), ended=ended)
    lines = [line.rpartition(" ") for line in total.render().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_counters_histograms_and_gauges_are_added() -> None:
    found = sums((one(2), False), (one(3), False))
    assert found['agentspec_requests_total{model="m",outcome="ok",route="/x"}'] == 5
    assert found['agentspec_request_duration_seconds_bucket{le="0.025",model="m",route="/x"}'] == 5
    assert found['agentspec_request_duration_seconds_bucket{le="0.01",model="m",route="/x"}'] == 0
    assert found["agentspec_requests_in_flight"] == 5
    assert found['agentspec_tenant_running{tenant="a"}'] == 5
    assert [value for name, value in found.items() if name.startswith("agentspec_build_info")] == [1]


def test_of_an_ended_process_what_it_counted_stays() -> None:
    found = sums((one(2), True), (one(3), False))
    assert found['agentspec_requests_total{model="m",outcome="ok",route="/x"}'] == 5
    assert found["agentspec_requests_in_flight"] == 3
    assert found['agentspec_tenant_refused_total{tenant="a"}'] == 5


def test_one_process_s_sum_is_its_own_text() -> None:
    metrics = one(1)
    total = MetricsSum()
    total.add(dump(metrics.registry))
    assert total.render() == metrics.render()


def test_a_part_of_the_metrics() -> None:
    registry = one(1).registry
    assert "tenant" not in dump(registry, but=["agentspec_tenant_"])
    assert "agentspec_requests" not in dump(registry, only=["agentspec_tenant_"])
