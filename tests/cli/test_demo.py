from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentspec.cli import app
from agentspec.cli.demo import AnswerDifference, DemoCall, divergences, speedup, statement
from agentspec.step.report import StepRow


def calls(off: str, on: str) -> list[DemoCall]:
    same = [DemoCall(mode, 0, "write", "x = 1") for mode in ("off", "on")]
    return [*same, DemoCall("off", 1, "revise", off), DemoCall("on", 1, "revise", on)]


def test_equal_answers_are_called_identical() -> None:
    assert divergences(calls("abc", "abc")) == []
    assert "identical" in statement(calls("abc", "abc"), []) and "all 2 calls" in statement(calls("abc", "abc"), [])


@pytest.mark.parametrize(("off", "on", "position"), [("abcd", "abXd", 2), ("abc", "ab", 2), ("", "a", 0)])
def test_a_difference_is_found_and_said(off: str, on: str, position: int) -> None:
    found = divergences(calls(off, on))
    assert found == [AnswerDifference(1, "revise", position)]
    said = statement(calls(off, on), found)
    assert "NOT identical: 1 of 2 calls" in said and f"task 2, revise: from character {position}" in said


def test_speedup_is_a_ratio_of_rates() -> None:
    off = StepRow(completion_tokens=10, model_seconds=2.0)
    assert speedup(off, StepRow(completion_tokens=10, model_seconds=0.5)) == 4
    assert speedup(off, StepRow()) is None


@pytest.mark.slow
@pytest.mark.model
def test_the_demo_runs(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    result = CliRunner().invoke(app, ["demo", "--tasks", "1", "--max-tokens", "8", "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "Outputs: identical" in result.output and "speedup" in result.output
    record = json.loads(file.read_text())
    assert record["identical"] and len(record["calls"]) == 6
    rows = {(row["workflow"], row["step"]): row for row in record["steps"]}
    assert set(rows) == {(mode, step) for mode in ("off", "on") for step in ("write", "critique", "revise")}
    for step in ("write", "critique", "revise"):
        assert rows["on", step]["verify_steps"] > 0 and rows["off", step]["verify_steps"] == 0
        assert rows["on", step]["completion_tokens"] == rows["off", step]["completion_tokens"] == 8


def test_wrong_usage() -> None:
    assert CliRunner().invoke(app, ["demo", "--tasks", "0"]).exit_code == 2
