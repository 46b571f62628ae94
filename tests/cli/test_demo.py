from __future__ import annotations

import pytest
from typer.testing import CliRunner

from agentspec.cli import app
from agentspec.cli.demo import statement


def test_a_difference_is_found_and_said() -> None:
    assert "identical" in statement(["x = 1", "abcd"], ["x = 1", "abcd"])
    assert "NOT identical: 1 of 2 calls" in statement(["x = 1", "abcd"], ["x = 1", "abXd"])


@pytest.mark.slow
@pytest.mark.model
def test_the_demo_runs() -> None:
    result = CliRunner().invoke(app, ["demo", "--tasks", "1", "--max-tokens", "8"])
    assert result.exit_code == 0, result.output
    heading, *rows, last = result.output.splitlines()
    assert heading.split() == ["step", "tokens", "forwards", "tokens/forward", "tok/s", "off", "tok/s", "on", "speedup"]
    assert [row.split()[0] for row in rows] == ["write", "critique", "revise"]
    for row in rows:
        _, tokens, forwards, *_, speedup = row.split()
        assert tokens == "8" and int(forwards) > 0 and speedup.endswith("x")
    assert last == "Outputs: identical with speculation off and on, in all 3 calls."


def test_wrong_usage() -> None:
    assert CliRunner().invoke(app, ["demo", "--tasks", "0"]).exit_code == 2
