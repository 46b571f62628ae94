"""The benchmark of the gateway itself: that it counts what happens, on a run too small to time anything."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentspec.benchmarks.gateway import measures
from agentspec.benchmarks.gateway.bench import (
    QUICK,
    GatewayReport,
    connections_of,
    run_gateway,
)
from agentspec.benchmarks.gateway.processes import Bench, BenchmarkFailedError, LineProcess, running
from agentspec.benchmarks.gateway.wire import Script, Target, percentile, summary
from agentspec.errors import ConfigurationError

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


def test_a_slow_answer_arrives_byte_by_byte(bench: Bench) -> None:
    script = Script("trickle", 4, 0.01)
    result = bench.client.do("calls", target=bench.gateway.target, connections=3, count=3, script=script)
    assert result["statuses"] == {"200": 3} and result["p50"] >= 0.03


def test_a_process_that_ends_early_is_reported() -> None:
    with LineProcess.start("upstream", "none") as process, pytest.raises(BenchmarkFailedError):
        process.hear()


def test_a_script_travels_in_the_message() -> None:
    request = Target(1, ("one", "two")).request(Script("stream", 7, 0.25), connection=3)
    assert b"Bearer two\r\n" in request and b'"stream": true' in request
    assert Script.of(request) == Script("stream", 7, 0.25)
    assert Script.of(b"{}") == Script()


def test_a_report_takes_the_median_and_judges_it() -> None:
    report = GatewayReport(QUICK)
    for value in (0.8, 0.4, 3.0):
        report.add({"call_processor_16": value})
    [figure] = report.figures()
    assert (figure.name, figure.value) == ("processor time per call, 16 connections", 0.8)
    assert figure.verdict == "met" and figure.note == "3 runs, 0.4 to 3"


def broken_bench(**results: Any) -> Any:
    """A bench whose load client reports these results by job, on a gateway that uses a second of processor time."""
    client = SimpleNamespace(do=lambda job, **given: results[job])
    process = SimpleNamespace(processor=time.monotonic, resident=lambda: 1, target=Target(1))
    return SimpleNamespace(client=client, gateway=process, upstream=process)


def test_calls_that_a_broken_connection_kept_from_being_made_are_no_throughput() -> None:
    bench = broken_bench(calls={"elapsed": 0.5, "processor": 0.1, "statuses": {"200": 9, "broken": 1}})
    figures = measures.throughput(bench, replace(TINY, calls=1000))
    assert figures["rate_2"] == 18 and figures["call_client_2"] == 10 and figures["call_failures_2"] == 991


@pytest.mark.parametrize("text", ["", "0", "16,16", "a", "1,,2", "-1", "10001"])
def test_wrong_connections_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"connections"):
        connections_of(text)


def test_percentiles() -> None:
    values = [float(number) for number in range(100)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([], 0.5)) == (50.0, 99.0, None)
    assert summary([]) == {"p50": None, "p99": None, "max": None}
    assert set(measures.MEASURES) == {"latency", "throughput", "streams", "overload"}
