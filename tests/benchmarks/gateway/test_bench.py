"""The benchmark of the gateway counts what happens, on a run too small to time anything."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentspec.benchmarks.gateway.bench import QUICK, run_gateway

pytest.importorskip("uvicorn")

TINY = replace(QUICK, pairs=5, calls=100, connections=(2,), streams=3, ramp=0.1, stream_seconds=0.5, every=0.1)


@pytest.mark.slow
@pytest.mark.counted
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_figures_of_a_tiny_run() -> None:
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
