"""The gateway as a process of its own under load: C2, C7, C8 and U9 at full length are marked `long`.

What depends on time is asserted there alone; `agentspec bench gateway` measures the same and more. SOAK_SECONDS makes
C8 shorter or longer than two hours.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentspec.benchmarks.gateway import bench as measures
from agentspec.benchmarks.gateway.bench import GatewayPlan
from agentspec.benchmarks.gateway.processes import (
    Bench,
    BenchmarkFailedError,
    ClientProcess,
    LineProcess,
    running,
)
from agentspec.benchmarks.gateway.wire import Script, Target

pytest.importorskip("uvicorn")
pytestmark = [
    pytest.mark.reliability,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads what a process uses from /proc"),
]
PLACES = 16
SOAK_SECONDS = float(os.environ.get("SOAK_SECONDS", "7200"))
SOAK_PATIENCE = 60.0  # of a client: the soak is about failures and not about haste


@contextmanager
def started(folder: Path, streams: int = 0) -> Iterator[Bench]:
    with running(folder, streams=streams, places=PLACES) as bench:
        measures.warm_up(bench)
        yield bench


def until(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.1)


def calls(bench: Bench, client: ClientProcess, tenant: int, script: Script, **sizes: Any) -> dict[str, Any]:
    target = Target(bench.gateway.target.port, bench.gateway.target.keys[tenant : tenant + 1])
    return client.do("arrivals", target=target, script=script, **{"patience": 60.0, "connections": 1000, **sizes})


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(GatewayPlan(streams=50, every=0.1, ramp=0.2, stream_seconds=0.3), marks=pytest.mark.slow),
        pytest.param(
            GatewayPlan(streams=1000, stream_seconds=300.0), marks=[pytest.mark.long, pytest.mark.timeout(1200)]
        ),
    ],
    ids=["50", "1000"],
)
def test_c2_a_thousand_streams_for_five_minutes(tmp_path: Path, plan: GatewayPlan) -> None:
    with started(tmp_path, plan.streams) as bench:
        before = bench.gateway.files()
        figures = measures.streams(bench, plan)
        until(lambda: bench.gateway.files() <= before + 8)  # connections that wait for their next call
    assert figures["stream_failures"] == 0
    if plan.streams == 1000:
        assert figures["stream_memory"] <= 150 and figures["delivery_p99"] <= 100


@pytest.mark.long
@pytest.mark.timeout(600)
def test_c7_five_times_the_capacity_for_a_minute(tmp_path: Path) -> None:
    """The capacity is the upstream's: 16 places of 160 ms. `test_overload.py` has the same by a clock that jumps."""
    with started(tmp_path) as bench:
        figures = measures.overload(bench, replace(GatewayPlan(), overload=5.0, overload_seconds=60.0))
    assert figures["goodput"] >= 80
    assert figures["failed"] == 0 and figures["shed"] > 0
    assert figures["recovery"] <= 5


@dataclass(slots=True)
class SoakWindows:
    """Windows of a long, even load: when each ended, the gateway's memory then, and within it the p99 and how many
    calls failed with which status.
    """

    seconds: list[float] = field(default_factory=list)
    failed: list[dict[str, int]] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Growth in MB per hour and drift of the p99 in percent, both without the first quarter, which warms up."""
        warm = len(self.seconds) // 4
        hours, sizes, late = np.asarray(self.seconds[warm:]) / 3600, self.resident[warm:], self.p99[warm:]
        third = max(1, len(late) // 3)
        first, last = np.median(late[:third]), np.median(late[-third:])
        slope = np.polyfit(hours, np.asarray(sizes) / 1e6, 1)[0] if len(sizes) > 1 else 0.0
        drift = 100 * (last / first - 1)
        failures = sum(sum(window.values()) for window in self.failed)
        return {"soak_growth": float(slope), "soak_drift": float(drift), "soak_failures": failures}


def soak(bench: Bench, length: float, *, rate: float = 200.0, window: float = 60.0) -> SoakWindows:
    """An even load for `length` seconds, in windows: calls, and in each window some streams."""
    found, started = SoakWindows(), time.monotonic()
    while (passed := time.monotonic() - started) < length:
        sizes: dict[str, Any] = {"count": 20, "every": 0.05, "ramp": 0.5, "seconds": 0.5}
        streamed = bench.client.do("streams", target=bench.gateway.target, **sizes)
        seconds = min(window, max(1.0, length - passed))
        result = measures.arrivals(bench, rate, seconds, Script("whole", 0, 0.02), SOAK_PATIENCE)
        found.seconds.append(time.monotonic() - started)
        found.resident.append(bench.gateway.resident())
        found.p99.append(1000 * (result["p99"] or 0.0))
        statuses = Counter(result["statuses"]) + Counter(streamed["statuses"])
        found.failed.append({status: count for status, count in statuses.items() if status != "200"})
    return found


@pytest.mark.slow
def test_c8_an_even_load_fails_no_call(tmp_path: Path) -> None:
    with started(tmp_path) as bench:
        windows = soak(bench, 3.0, rate=20.0, window=1.0)
    assert windows.figures()["soak_failures"] == 0 and len(windows.resident) == len(windows.p99) > 0


@pytest.mark.long
@pytest.mark.timeout(int(SOAK_SECONDS) + 600)
def test_c8_two_hours_of_ten_times_the_usual_load(tmp_path: Path) -> None:
    with started(tmp_path) as bench:
        windows = soak(bench, SOAK_SECONDS)
    figures = windows.figures()
    told = f"{figures}; {windows}"  # a string, which pytest does not shorten
    assert figures["soak_failures"] == 0, told
    assert figures["soak_growth"] < 1, told
    assert figures["soak_drift"] < 10, told


@pytest.mark.parametrize(
    ("slow", "seconds"),
    [pytest.param(20, 1.0, marks=pytest.mark.slow), pytest.param(200, 30.0, marks=pytest.mark.long)],
)
def test_u9_slow_answers_fail_no_call_of_another_tenant(tmp_path: Path, slow: int, seconds: float) -> None:
    """One tenant's calls alone, and beside as many answers of another tenant's that come by a byte a second."""
    usual = Script("whole", 0, 0.02)
    with started(tmp_path) as bench, LineProcess.start("client") as process, ThreadPoolExecutor() as threads:
        alone = calls(bench, bench.client, 1, usual, rate=50.0, seconds=seconds)
        sizes: dict[str, Any] = {"rate": 100.0, "seconds": slow / 100, "patience": 600.0}
        trickling = threads.submit(calls, bench, ClientProcess(process), 0, Script("trickle", 600, 1.0), **sizes)
        until(lambda: bench.gateway.files() > 2 * slow)
        beside = calls(bench, bench.client, 1, usual, rate=50.0, seconds=seconds)
        assert bench.gateway.files() > 2 * slow and not trickling.done()
        process.popen.kill()
        assert isinstance(trickling.exception(60), BenchmarkFailedError)
    assert alone["statuses"] == beside["statuses"] == {"200": 50 * seconds}
    if slow == 200:
        assert beside["p99"] <= 1.5 * alone["p99"]
