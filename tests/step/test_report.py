from __future__ import annotations

import threading
from importlib import import_module

import pytest

from agentspec.protocol.speculation import RetrievalSpeculation, StepSpeculation
from agentspec.step.report import OTHER, Report, StepStatistics
from agentspec.types import Speculation, Usage


def test_rows_are_bounded_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("agentspec.step.report"), "MAX_ROWS", 3)
    ledger = StepStatistics()
    for number in range(10):
        ledger.add_call(("w", f"step {number}"), Usage(1, 1), None, 0.1)
        ledger.add_run(("w", f"step {number}"), 0.1, failed=False)
    rows = ledger.rows()
    assert len(rows) == 4 and (rows[-1].workflow, rows[-1].step) == OTHER
    assert sum(row.calls for row in rows) == sum(row.runs for row in rows) == 10


def test_threads_do_not_lose_counts() -> None:
    ledger = StepStatistics()

    def work() -> None:
        for _ in range(500):
            ledger.add_call(("w", "s"), Usage(2, 3), Speculation(steps=1), 0.001)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (row,) = ledger.rows()
    assert (row.calls, row.prompt_tokens, row.verified_tokens, row.verify_steps) == (2000, 4000, 6000, 2000)


def test_steps_of_thinking_and_rounds_of_retrieval_are_no_forwards() -> None:
    ledger = StepStatistics()
    for speculation in (Speculation(steps=2), StepSpeculation(steps=5), RetrievalSpeculation(steps=4)):
        ledger.add_call(("w", "s"), Usage(1, 60), speculation, 0.1)
    (row,) = ledger.rows()
    assert (row.verify_steps, row.rounds, row.tokens_per_step) == (2, 9, 30)


def test_a_report_is_a_snapshot_and_a_table() -> None:
    ledger = StepStatistics()
    ledger.add_call((None, "plan"), Usage(2, 6), Speculation(drafted=8, accepted=4, steps=2), 2.0)
    report = Report(tuple(ledger.rows()), ledger)
    ledger.add_call((None, "later"), None, None, 1.0)
    assert [row.step for row in report] == ["plan"]
    text = str(report)
    assert "plan" in text and "3.00" in text and "later" not in text
    report.reset()
    assert ledger.rows() == [] and len(report.rows) == 1


def test_any_name_can_be_printed() -> None:
    statistics = StepStatistics()
    statistics.add_run(("flow \ud800", "plan \udfff"), 1.0, failed=False)
    report = Report(tuple(statistics.rows()), statistics)
    heads, row, note = str(report).encode().decode().splitlines()
    assert row.split() == "flow ? plan ? 1 0 1.00 0 0 0.00 0 0 0 - 0 0 0 0.00".split()
    assert heads.startswith("workflow  step") and "no model call was counted" in note
    assert report.rows[0].step == "plan \udfff"
