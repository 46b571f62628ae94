"""The run over engines from end to end, with a stand-in for the servers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentspec.benchmarks.engines import run
from agentspec.benchmarks.engines.run import EnginePlan, EngineResults, read_results, run_engines, write_results
from agentspec.benchmarks.engines.variants import COMMANDS, EngineName, variants
from agentspec.cli import app
from agentspec.errors import ConfigurationError

FAKE = f"{sys.executable} {Path(__file__).with_name('fake_engine.py')} {{model}} {{port}}"
PROMPTS = ("one two three four", "five six seven eight nine")


def quiet(message: str) -> None:
    pass


def plan(tmp_path: Path, **changed: Any) -> EnginePlan:
    given: dict[str, Any] = {"engines": [EngineName.vllm], "model": "m", "commands": dict.fromkeys(EngineName, FAKE)}
    return EnginePlan(results=tmp_path / "results.json", prompts=PROMPTS, max_tokens=9, **{**given, **changed})


def test_each_engine_is_run_without_drafts_with_its_own_and_with_ours() -> None:
    chosen = {engine: list(variants(engine)) for engine in EngineName}
    keys = [variant.key for variant in chosen[EngineName.sglang]]
    assert keys[:3] == ["sglang off", "sglang NGRAM 8", "sglang agentspec 8"] and len(keys) == 1 + 2 * 3
    assert len(chosen[EngineName.vllm]) == 1 + 5 * 3
    for engine, found in chosen.items():
        assert "{port}" in COMMANDS[engine] and len({variant.key for variant in found}) == len(found)
        for variant in found:
            ours = "agentspec" in variant.drafter
            assert variant.cached == ours == (variant.variables.get(f"AGENTSPEC_{engine.upper()}") != "off")


@pytest.mark.slow
@pytest.mark.counted
def test_a_run_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "variants", lambda engine: list(variants(engine))[:3])
    found = run_engines(plan(tmp_path), progress=quiet)
    off, arctic, ours = found.measured["vllm off"], found.measured["vllm Arctic 7"], found.measured["vllm agentspec 7"]
    assert "Arctic Inference is not installed" in arctic["failed"] and found.left == []
    assert list(off["parts"]) == list(ours["parts"]) == ["cold", "warm", "8 at once", "after restart"]
    assert [answer["tokens"] for answer in off["parts"]["cold"]["answers"]] == [5, 6]
    steps = {part: [answer["steps"] for answer in measured["answers"]] for part, measured in ours["parts"].items()}
    assert steps == {"cold": [5, 6], "warm": [2, 2], "8 at once": [2, 2], "after restart": [2, 2]}
    kept = json.loads((tmp_path / "results.json").read_text())
    assert kept["measured"] == found.measured
    rows = list(found._rows())
    assert len(rows) == 8 and all(row[4] == "2 of 2" for row in rows)


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "variants", lambda engine: list(variants(engine))[::7][:2])
    assert run_engines(plan(tmp_path, seconds=0.0), progress=quiet).left == ["vllm off", "vllm agentspec 15"]
    write_results(EngineResults(plan(tmp_path).subject, {"vllm off": {"failed": "y"}}), plan(tmp_path).results)
    started: list[str] = []
    monkeypatch.setattr(run, "_measured", lambda variant, *_: started.append(variant.key) or {"failed": "x"})
    assert run_engines(plan(tmp_path), progress=quiet).left == []
    assert started == ["vllm agentspec 15", "vllm off"], "what failed is tried again, after all others"


WRITES = "import json, sys; json.dump({'rest': sys.argv[1:]}, open(sys.argv[4], 'w')); print('a table')"


@pytest.mark.parametrize(("end", "failed"), [("", {}), ("; sys.exit('a check failed')", {"failed": "a check failed"})])
def test_the_local_engine_comes_first_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, failed: dict[str, str]
) -> None:
    monkeypatch.setattr(run, "variants", lambda engine: [])
    monkeypatch.setattr(run, "AGENTSPEC", (sys.executable, "-c", WRITES + end))
    asked = plan(tmp_path, seconds=60.0, local=["--shape", "1b"])
    found = run_engines(asked, progress=quiet).measured[run.LOCAL]
    assert found["figures"]["rest"][:2] == ["bench", "gpu"]
    assert found["figures"]["rest"][-4:] == ["--seconds", "60.0", "--shape", "1b"]
    assert found == {"shown": "a table\n", "figures": found["figures"], **failed}
    monkeypatch.setattr(run, "AGENTSPEC", ("/nowhere",))
    again = run_engines(asked, progress=quiet)
    assert again.measured == {run.LOCAL: found} and again.left == []
    assert "a table\n" in list(again.show())


def test_a_local_engine_that_cannot_be_measured_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "variants", lambda engine: [])
    found = run_engines(plan(tmp_path, local=["--shape", "huge"]), progress=quiet).measured[run.LOCAL]
    assert "figures" not in found and "huge" in found["failed"]


def test_results_of_something_else_are_not_mixed_in(tmp_path: Path) -> None:
    first = plan(tmp_path)
    write_results(EngineResults(first.subject, {"vllm off": {"failed": "x"}}), first.results)
    assert read_results(plan(tmp_path)).measured == {"vllm off": {"failed": "x"}}
    with pytest.raises(ConfigurationError, match="measured with other model: name another file"):
        read_results(plan(tmp_path, model="another"))
    first.results.write_text("{")
    with pytest.raises(ConfigurationError, match="holds no results to go on with"):
        read_results(first)
    assert not list(tmp_path.glob("results.json?*")), "nothing half-written is left"


def test_the_command_names_what_is_missing(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "no" / "file.json")
    done = CliRunner().invoke(app, ["bench", "engines", "--model", "m", "--results", nowhere])
    assert done.exit_code == 2
    given = ["bench", "engines", "--model", "m", "--results", str(tmp_path / "file.json"), "--command", "serve it"]
    done = CliRunner().invoke(app, [*given, "--engine", "vllm"])
    assert done.exit_code == 2 and "{port}" in done.output
