"""The benchmark of the gateway itself: that it counts what happens, on a run too small to time anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentspec.benchmarks.gateway.bench import (
    QUICK,
    GatewayReport,
    run_gateway,
)
from agentspec.benchmarks.gateway.processes import Bench, running
from agentspec.benchmarks.gateway.wire import Script

pytest.importorskip("uvicorn")

TINY = replace(QUICK, pairs=5, calls=100, connections=(2,), streams=3, ramp=0.1, stream_seconds=0.5, every=0.1)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    if not Path("/proc/self/stat").exists():
        pytest.skip("reads /proc")
    with running(tmp_path_factory.mktemp("bench"), streams=10, places=2) as started:
        yield started


@pytest.mark.slow
@pytest.mark.counted
def test_figures_of_a_tiny_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.benchmarks.gateway.bench.running", lambda *_, **__: nullcontext(bench))
    report = run_gateway(TINY, measures=("latency", "throughput", "streams"))
    figures = {figure.name: figure for figure in report.figures()}
    assert figures["added latency, one at a time, p50"].value
    assert (figures["calls per second, 2 connections"].value or 0) > 0
    assert figures["streams: failed"].value == 0
    assert figures["streams: processor time per event"].required == 0.1
    data = json.loads(json.dumps(report.data()))
    assert data["plan"]["calls"] == 100 and len(data["runs"]["rate_2"]) == 1
    [table] = report.show()
    assert table.row_count == len(figures)  # type: ignore[union-attr]


def test_answers_beyond_the_places_wait_and_a_gone_client_is_counted(bench: Bench) -> None:
    sizes: dict[str, Any] = {"rate": 40.0, "seconds": 0.5, "connections": 50, "target": bench.gateway.target}
    script = Script("placed", 0, 0.05)
    assert bench.client.do("arrivals", script=script, patience=60.0, **sizes)["statuses"] == {"200": 20}
    script = Script("placed", 0, 60.0)
    assert bench.client.do("arrivals", script=script, patience=0.2, **sizes)["statuses"] == {"gave up": 20}
    assert bench.gateway.resident() > 1 << 20 and bench.gateway.files() > 3


def test_a_report_takes_the_median_and_judges_it() -> None:
    report = GatewayReport(QUICK)
    for value in (0.8, 0.4, 3.0):
        report.add({"call_processor_16": value})
    [figure] = report.figures()
    assert (figure.name, figure.value) == ("processor time per call, 16 connections", 0.8)
    assert figure.verdict == "met" and figure.note == "3 runs, 0.4 to 3"
