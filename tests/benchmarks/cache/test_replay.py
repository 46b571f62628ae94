"""The benchmark of the cache: replayed calls, measured costs, and the report of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentspec.benchmarks.cache.costs import TREE, measure_costs
from agentspec.benchmarks.cache.replay import run_cache
from agentspec.benchmarks.report import print_report, write_json
from agentspec.benchmarks.traces import END, START

IDS = {START: 1, END: 2}


def encode(text: str) -> list[int]:
    for mark, number in IDS.items():
        text = text.replace(mark, chr(number))
    return [ord(character) for character in text]


def quiet(message: str) -> None:
    pass


def test_the_second_call_is_drafted_from_the_first(calls_of: Any, tmp_path: Path) -> None:
    answers = [f'{{"name": "look_up_order", "arguments": {{"id": {number}}}}}' for number in range(8)]
    trace = calls_of("agent_tau2", answers)
    report = run_cache([trace], encode, calls=600, budgets=(32, 8), progress=quiet)
    (file,) = report.files
    assert file.name == "agent_tau2" and report.budgets == [8, 32] and report.costs is None
    for replay in file.replays.values():
        assert replay.tokens == [len('{"name": "look_up_order", "arguments": {"id": 0}}') + 1] * 8
        assert replay.steps[0] > 2 * replay.steps[-1]
    assert file.replays[32].tokens_per_step > file.replays[8].tokens_per_step > 1.5
    console = Console(record=True, width=240)
    print_report(report, console)
    assert "agent_tau2" in console.export_text()
    write_json(report, tmp_path / "out.json", {"tokenizer": "t"})
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["environment"] == {"tokenizer": "t"} and len(data["files"][0]["budgets"]["8"]["calls"]["steps"]) == 8


@pytest.mark.slow
@pytest.mark.counted
def test_every_cost_is_measured() -> None:
    costs = measure_costs(1500, lambda message: None, cached=3000)
    assert costs.draft.cached_tokens == 3000 and costs.opened_tokens == 1500
    assert 0 < costs.draft.median <= costs.draft.p99 <= costs.draft.longest < 10
    assert 1 < costs.draft.tree <= TREE
    for value in (costs.insert, costs.record, costs.request_start, costs.open_seconds):
        assert 0 < value < 10
    assert costs.insert < costs.record  # recording includes it
    assert 8 <= costs.memory_bytes < 40 and costs.disk_bytes > 1
    assert costs.segment_bytes is not None and 8 < costs.segment_bytes < 12
