from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

COMMANDS = ["serve", "demo", "bench", "model", "cache", "config", "doctor"]


def test_help_names_every_command_and_the_exit_codes(program):
    result = program("--help")
    assert result.exit_code == 0
    assert "Exit codes: 0 done, 1 failed, 2 wrong usage or configuration" in result.output
    for command in COMMANDS:
        assert re.search(rf"^\W*{command}\b", result.output, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(program, command):
    result = program(command, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_version(program):
    result = program("--version")
    assert result.exit_code == 0
    assert re.fullmatch(r"agentspec \d+\.\d+\.\d+\n", result.output)


def test_names_that_no_encoding_holds_are_printed(program, monkeypatch):
    """A file's name may be any bytes, and a label half a surrogate pair."""
    found = SimpleNamespace(folder="odd \udcff \ud800")
    monkeypatch.setattr("agentspec.backends.model_store.resolve", lambda name: found)
    result = program("model", "fetch", "smollm2-135m")
    assert (result.exit_code, result.output) == (0, "odd \\udcff \\ud800\n")


def test_wrong_usage_exits_with_2(program):
    assert program("nonsense").exit_code == 2
    assert program("serve", "--port", "x").exit_code == 2
    assert program("config", "nonsense").exit_code == 2
