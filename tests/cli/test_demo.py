from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentspec.cli import app
from agentspec.cli.demo import statement


def test_a_difference_is_found_and_said() -> None:
    off = {"task 1, write": "x = 1", "task 2, revise": "abcd"}
    assert "identical" in statement(off, off) and "all 2 calls (9 characters)" in statement(off, off)
    said = statement(off, off | {"task 2, revise": "abXd"})
    assert "NOT identical: 1 of 2 calls" in said and "task 2, revise" in said and "task 1" not in said


@pytest.mark.slow
@pytest.mark.model
def test_the_demo_runs(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    result = CliRunner().invoke(app, ["demo", "--tasks", "1", "--max-tokens", "8", "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "Outputs: identical" in result.output and "speedup" in result.output
    record = json.loads(file.read_text())
    assert record["identical"] and [len(answers) for answers in record["answers"].values()] == [3, 3]
    rows = {(row["workflow"], row["step"]): row for row in record["steps"]}
    assert set(rows) == {(mode, step) for mode in ("off", "on") for step in ("write", "critique", "revise")}
    for step in ("write", "critique", "revise"):
        assert rows["on", step]["verify_steps"] > 0 and rows["off", step]["verify_steps"] == 0
        assert rows["on", step]["completion_tokens"] == rows["off", step]["completion_tokens"] == 8


def test_wrong_usage() -> None:
    assert CliRunner().invoke(app, ["demo", "--tasks", "0"]).exit_code == 2
