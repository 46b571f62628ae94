from __future__ import annotations

import json
from dataclasses import replace
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


def test_a_file_unknown_to_the_peer_and_missing_costs_leave_gaps(report: CacheReport) -> None:
    text = printed(CacheReport([report.files[1]], [8, 32], "constants: x", None))
    assert "own" in text and "2.000" in text and "Further costs" not in text


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


def verdicts(costs: Costs | None, *files: FileResult) -> dict[str, str]:
    return {goal.name: goal.verdict for goal in CacheReport(files, [8, 32], "constants", costs).goals()}


def file_of(name: str, per_step: float, peer: float, predicted: float = 0.5) -> FileResult:
    """Half of its drafted nodes are accepted."""
    chances = [np.full(100, predicted, dtype=np.float32)]
    half = [np.arange(100) % 2 == 0]
    replays = {budget: Replay([int(1000 * per_step)], [1000], [100], chances, half, [1e-5, 2e-5]) for budget in (8, 32)}
    return FileResult(name, replays, {8: peer, 32: peer})


def test_drafting_is_judged_by_mean_and_by_the_lowest_file() -> None:
    found = verdicts(None, file_of("a", 3.0, 2.0), file_of("b", 2.0, 1.98))
    assert found["tokens/step vs peer, budget 8, geometric mean"] == "aim met"
    assert found["tokens/step vs peer, budget 8, lowest file"] == "missed"


def test_calibration_takes_the_worst_file() -> None:
    name = "calibration at budget 32, worst bin of any file"
    assert verdicts(None, file_of("a", 3.0, 2.0))[name] == "aim met"
    assert verdicts(None, file_of("a", 3.0, 2.0), file_of("b", 3.0, 2.0, predicted=0.3))[name] == "missed"


def test_a_smaller_cache_on_disk_can_only_miss(report: CacheReport) -> None:
    name, costs = "open a cache of 10 M tokens until the first draft", report.costs
    assert costs is not None
    assert verdicts(costs)[name] == "not measured"
    assert verdicts(replace(costs, open_seconds=2.0))[name] == "missed"
    assert verdicts(replace(costs, opened_tokens=10_000_000))[name] == "met"


def test_what_was_not_measured_is_listed_all_the_same(report: CacheReport) -> None:
    assert set(verdicts(None).values()) == {"not measured"}
    assert list(verdicts(None)) == list(verdicts(report.costs))
