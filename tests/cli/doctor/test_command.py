from __future__ import annotations

import json
from pathlib import Path


def test_all_is_well(program, model_folder):
    Path("agentspec.toml").write_text(f'[backends.local]\nkind = "torch"\nmodel = "{model_folder}"\ndevice = "cpu"\n')
    result = program("doctor")
    assert result.exit_code == 0, result.output
    assert f"ok    local: model: {model_folder} is ready" in result.output
    rows = json.loads(program("doctor", "--json").output)
    assert {row["state"] for row in rows} == {"ok"}


def test_what_is_broken_says_what_to_do_and_exits_with_1(program):
    Path("agentspec.toml").write_text('[backends.up]\nkind = "openai"\nbase_url = "http://127.0.0.1:1/v1"\n')
    result = program("doctor")
    assert result.exit_code == 1
    lines = result.output.splitlines()
    failed = [index for index, line in enumerate(lines) if line.startswith("FAIL")]
    assert failed
    assert all(lines[index + 1].startswith("      -> ") for index in failed)


def test_a_broken_configuration_is_a_failure_among_the_others(program, model_folder, monkeypatch):
    Path("agentspec.toml").write_text("[server]\nprot = 1\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    rows = json.loads(program("doctor", "--json").output)
    assert rows[0]["name"] == "configuration"
    assert rows[0]["state"] == "fail"
    assert len(rows) > 5
