from __future__ import annotations

import json
from pathlib import Path

import pytest

REPEATED = "The quick brown fox jumps over the lazy dog, and then the lazy dog sleeps."
SYSTEM = {"role": "system", "content": "Be kind."}  # without it the template adds one of its own


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    lines = [
        {
            "session": f"s{number}",
            "step": 0,
            "messages_delta": [SYSTEM, {"role": "user", "content": f"say it {number}"}],
            "response": REPEATED,
        }
        for number in range(12)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.model
def test_what_a_log_would_have_saved(program, log, default_model):
    result = program("cache", "replay", log, "--model", default_model.folder, "--json")
    values = json.loads(result.stdout)
    assert (values["calls"], values["window"], values["bad"], values["budget"]) == (12, 2, 0, 32)
    assert values["tokens"] > values["steps"] and 0 < values["saved"] < 1
    assert values["tokens_per_step_over_time"][-1] > 5 > values["tokens_per_step_over_time"][0]
    assert values["hit_rate_over_time"][-1] > 0.5
    same = json.loads(program("cache", "replay", log, "--tokenizer", default_model.folder, "--json").stdout)
    assert same == values  # the default model's template is ChatML
    short = json.loads(
        program("cache", "replay", log, log, "--tokenizer", default_model.folder, "--calls", "13", "--json").stdout
    )
    assert short["calls"] == 13
    result = program("cache", "replay", log, "--tokenizer", default_model.folder)
    assert "steps with a hit" in result.stdout and "of its steps saved" in result.stdout
    (done,) = [line for line in result.stderr.splitlines() if "replaying 12 calls" in line]
    assert " 12 " in done.partition("calls")[2]  # the bar ends at what was replayed


@pytest.mark.model
def test_bad_lines(program, log, default_model):
    record = {"messages": [{"role": "user", "content": [1]}], "response": "x"}
    log.write_text('{"session": 1}\n' + json.dumps(record) + "\n" + json.dumps(record | {"messages": []}) + "\n")
    options = ("--tokenizer", default_model.folder, "--format", "log")
    refused = program("cache", "replay", log, *options)
    assert (refused.exit_code, f"{log}:1: " in refused.stderr) == (2, True)
    result = program("cache", "replay", log, *options, "--skip-bad", "--json")
    assert json.loads(result.stdout)["bad"] == 2 and f"{log}:2: " in result.stderr


def test_what_cannot_be_replayed(program, log, tmp_path):
    for options, message in [
        ([], "either --model or --tokenizer"),
        (["--model", "m", "--tokenizer", tmp_path], "either --model or --tokenizer"),
        (["--tokenizer", tmp_path], "no tokenizer.json"),
    ]:
        result = program("cache", "replay", log, *options)
        assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


@pytest.mark.model
def test_files_without_calls(program, default_model, tmp_path):
    (tmp_path / "export.jsonl").write_text('{"agentspec_export": 1}\n')
    result = program("cache", "replay", tmp_path / "export.jsonl", "--tokenizer", default_model.folder)
    assert (result.exit_code, "holds tokens and not the calls" in result.stderr) == (2, True)
    (tmp_path / "empty.jsonl").write_text("\n")
    result = program(
        "cache", "replay", tmp_path / "empty.jsonl", "--format", "chat", "--tokenizer", default_model.folder
    )
    assert (result.exit_code, "no model calls" in result.stderr) == (2, True)


@pytest.mark.model
def test_the_calls_that_ship_as_an_example(program, default_model, repository, tmp_path):
    """The cache page's two commands: an empty folder takes six answers; half of the model's steps would be saved."""
    calls, model = repository / "examples" / "calls.jsonl", ("--model", default_model.folder)
    imported = program("cache", "import", calls, *model, "--path", tmp_path / "cache", "--json")
    assert json.loads(imported.stdout)["added"] == 6
    replayed = json.loads(program("cache", "replay", calls, *model, "--json").stdout)
    assert (replayed["calls"], replayed["bad"]) == (6, 0) and replayed["saved"] > 0.5
    refused = program("cache", "import", calls, *model)
    assert refused.exit_code == 2 and "give --path FOLDER" in refused.stderr
