from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from agentspec.benchmarks.cache.costs import Costs, Latency
from agentspec.benchmarks.cache.replay import CacheReport, FileResult
from agentspec.benchmarks.report import print_report, write_json
from agentspec.recordings.replay import Replay


def replay_of(tokens: int) -> Replay:
    chances = np.linspace(0.1, 0.9, 40, dtype=np.float32)
    result = Replay([tokens] * 120, [100] * 120, [700] * 120, [chances], [chances > 0.5], [2e-5] * 99 + [1e-3])
    result.extend_seconds, result.prompt_tokens = 0.12, 1000
    return result


@pytest.fixture
def report() -> CacheReport:
    latency = Latency(1_000_000, 100, 31.5, 20e-6, 60e-6, 1e-3)
    costs = Costs(latency, 1.5e-6, 5e-6, 5e-9, 20.0, 5.0, 1_000_000, 0.5)
    known = FileResult("agent_tau2", {8: replay_of(250), 32: replay_of(300)}, {8: 2.0, 32: 2.0})
    return CacheReport(
        [known, FileResult("own", {8: replay_of(200), 32: replay_of(210)})], [8, 32], "constants: x", costs
    )


def printed(report: CacheReport) -> str:
    console = Console(record=True, width=240)
    print_report(report, console)
    return console.export_text()


def test_tables_show_each_figure_beside_its_goal(report: CacheReport) -> None:
    text = printed(report)
    assert "constants: x" in text
    for figure in ("2.500", "1.250", "7.0", "1.5 us", "<= 2 us", "<= 0.7 us", "5 us"):
        assert figure in text
    assert "missed" in text and "aim met" in text and "not measured" in text


def test_json_holds_the_counts_of_every_call(report: CacheReport, tmp_path: Path) -> None:
    write_json(report, tmp_path / "out.json", {"tokenizer": "t"})
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["environment"] == {"tokenizer": "t"} and data["peer"] == "constants: x"
    figures = data["files"][0]["budgets"]["8"]
    assert figures["ratio"] == 1.25 and len(figures["calls"]["steps"]) == 120 and len(figures["calibration"]) == 10
    assert figures["seconds"]["extend_per_token"] == pytest.approx(0.12 / 30_000)
    assert data["files"][1]["budgets"]["8"]["ratio"] is None
    assert data["costs"]["draft"]["tree"] == 31.5
    assert {goal["verdict"] for goal in data["goals"]} >= {"met", "missed"}
