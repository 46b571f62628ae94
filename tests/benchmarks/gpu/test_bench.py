"""The GPU benchmark on the CPU, with a model of two layers: every part runs, and says that it is no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentspec.benchmarks.gpu.bench import GpuPlan, run_gpu
from agentspec.benchmarks.report import print_report, write_json
from agentspec.benchmarks.runs import OFF

ANSWER = "check the order again please and then check the order again please"


@pytest.mark.slow
@pytest.mark.counted
def test_all_of_it_on_the_cpu(tokenizer: Path, calls_of: Any, tmp_path: Path) -> None:
    traces = calls_of("airline", [ANSWER] * 8)
    report = run_gpu(GpuPlan("tiny", "cpu", "float32", 3600, (traces,), tokenizer, questions=4))
    assert report.sound and len(report.checks) == 2 and not report.left_out
    assert len(report.steps) == 14 and all(seconds > 0 for seconds in report.steps.values())
    (table,) = report.tables
    assert table.identical("on", OFF) == 8
    tokens_per_step = table.tokens_per_step("on")
    assert table.tokens_per_step(OFF) == 1.0 and tokens_per_step is not None and tokens_per_step > 1.0
    console = Console(record=True, width=200, quiet=False)
    print_report(report, console)
    text = console.export_text()
    assert "tiny, random weights, float32 on CPU" in text and "not judged here" in text
    assert ", goal" not in text and "device memory, high-water: not measured" in text
    assert "airline: on / off, forced targets, random weights" in text
    ratios = [figure for figure in report.figures if "verify 32" in figure.name or "on / off" in figure.name]
    assert len(ratios) == 3 and all(figure.interval is not None for figure in ratios)
    write_json(report, tmp_path / "out.json", {"torch": "x"})
    written: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    assert written["device"] == "CPU" and {figure["met"] for figure in written["figures"]} == {None}
    assert len(written["tables"][0]["runs"]["on"]) == 8
