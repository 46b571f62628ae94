"""An engine's process: what is told when it fails, and that nothing of it stays."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from agentspec.benchmarks.vllm.engine import EngineFailedError, EngineProcess, started

READY = 'print(\'{"ready": 1, "info": {"device": "x"}}\', flush=True)'
CHILD = "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
LONG = 3600.0


def engine(tmp_path: Path, program: str, name: str = "off") -> EngineProcess:
    return EngineProcess(name, [sys.executable, "-c", program], tmp_path / f"{name}.log")


@pytest.mark.parametrize("waits", ["time.sleep(600)", "sys.stdin.read(1); time.sleep(600)"])
def test_an_engine_that_neither_reads_nor_answers_is_killed(tmp_path: Path, waits: str) -> None:
    found = engine(tmp_path, f"import sys, time; {READY}; {waits}").launch()
    found.wait(LONG)
    assert found.info == {"device": "x"}
    long = [[1] * 200_000]  # more than a pipe holds
    with pytest.raises(EngineFailedError, match=r"there was no answer within 0 s; the end of its log:\n\(empty\)"):
        found.generate(long, 1, seconds=0.2)
    with pytest.raises(EngineFailedError, match="its process ended"):
        found.call("bench_count", seconds=LONG)


def test_children_are_killed_with_their_engine(tmp_path: Path) -> None:
    told = "print(child.pid, file=sys.stderr, flush=True)"
    failed: dict[str, str] = {}
    with started([engine(tmp_path, f"{CHILD}; {told}; {READY}; time.sleep(600)")], LONG, failed) as ready:
        assert [found.name for found in ready] == ["off"] and failed == {}
        child = int((tmp_path / "off.log").read_text())
        os.kill(child, 0)
    while _runs(child):  # a signal takes its time
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_engines_that_do_not_start_are_told_and_others_go_on(tmp_path: Path) -> None:
    failed: dict[str, str] = {}
    engines = [
        engine(tmp_path, READY + "; input()", "good"),
        engine(tmp_path, "raise SystemExit('no memory')", "poor"),
        EngineProcess("none", ["/no/such/program"], tmp_path / "none.log"),
    ]
    with started(engines, LONG, failed) as ready:
        assert [found.name for found in ready] == ["good"]
    assert "its process ended; the end of its log:\nno memory" in failed["poor"]
    assert "its program cannot be started" in failed["none"]
