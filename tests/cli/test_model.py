from __future__ import annotations

import pytest

from agentspec.backends.model_store import BUILTIN


def test_fetch_prints_the_folder(program, model_folder):
    result = program("model", "fetch", model_folder)
    assert (result.exit_code, result.output) == (0, f"{model_folder}\n")


def test_an_unknown_model_exits_with_1(program):
    result = program("model", "fetch", "smollm")
    assert result.exit_code == 1
    assert "smollm2-135m" in result.stderr


def test_list(program):
    lines = program("model", "fetch").output.splitlines()
    assert [line.split()[0] for line in lines] == list(BUILTIN)
    assert all(" not fetched " in line for line in lines)


@pytest.mark.model
def test_a_ready_model_is_listed_as_such(program, default_model, monkeypatch):
    monkeypatch.setenv("AGENTSPEC_MODELS", str(default_model.folder.parent.parent))
    assert "smollm2-135m   ready" in program("model", "fetch").output
