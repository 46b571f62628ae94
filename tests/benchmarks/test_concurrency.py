from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from agentspec.benchmarks.concurrency import (
    OFF_ALONE,
    OFF_AT_ONCE,
    ON_ALONE,
    ON_AT_ONCE,
    VARIANTS,
    ConcurrencyReport,
    run_concurrency,
)
from agentspec.benchmarks.report import print_report, write_json
from agentspec.benchmarks.runs import Run, RunTable


def table_of(seconds: dict[str, float]) -> RunTable:
    table = RunTable("8 requests at once")
    for index in range(7):
        for name, value in seconds.items():
            table.add(name, Run((index,) * 100, value))
    return table


def test_each_at_once_is_compared_with_its_own_one_at_a_time(tmp_path: Path) -> None:
    report = ConcurrencyReport(table_of({OFF_ALONE: 10.0, OFF_AT_ONCE: 5.0, ON_ALONE: 4.0, ON_AT_ONCE: 4.0}))
    console = Console(record=True, width=120)
    print_report(report, console)
    text = console.export_text()
    assert "goal 1.8x: met" in text and "goal 1.5x: missed" in text and "7/7" in text
    write_json(report, tmp_path / "out.json", {"model": "m"})
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["ratios"][OFF_AT_ONCE]["median"] == 2.0
    assert len(written["runs"][ON_ALONE]) == 7


def test_answers_at_once_are_those_one_at_a_time(model: str) -> None:
    table = run_concurrency(model, clients=3, rounds=1, max_tokens=8).runs
    assert set(table.runs) == set(VARIANTS)
    assert len({run.tokens for runs in table.runs.values() for run in runs}) == 1
