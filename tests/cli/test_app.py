"""The program as a whole: help, exit codes, and how its commands say what went wrong."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main

from agentspec.cli import app

COMMANDS = ["serve", "launch", "demo", "bench", "model", "cache", "config", "doctor", "verify", "kb", "knn", "trace"]


def test_help_names_every_command_and_the_exit_codes(program):
    result = program("--help")
    assert result.exit_code == 0
    assert "Exit codes: 0 done, 1 failed, 2 wrong usage or configuration" in result.output
    for command in COMMANDS:
        assert re.search(rf"^\W*{command}\b", result.output, re.MULTILINE)
        assert "Usage:" in program(command, "--help").output
    assert re.fullmatch(r"agentspec \d+\.\d+\.\d+\n", program("--version").output)


def commands(group: Any, name: str = "agentspec") -> Iterator[tuple[str, Any]]:
    yield name, group
    for child, command in getattr(group, "commands", {}).items():
        yield from commands(command, f"{name} {child}")


EVERY = dict(commands(typer.main.get_command(app)))


def test_help_shows_all_that_is_written_and_every_default() -> None:
    for name, command in EVERY.items():
        with command.make_context(name, [], resilient_parsing=True) as context:
            context.max_content_width = context.terminal_width = 400
            shown = " ".join(command.get_help(context).split())
        written = [command.help, *(one.help or "" for one in command.params)]
        assert [text for text in written if " ".join(text.split()) not in shown] == [], name
        for one in command.params:
            flag, default = getattr(one, "is_flag", False), one.default
            assert not flag or not re.search(rf"{one.opts[0]} <", shown), (name, one.name)
            said = one.required or flag or default in (None, (), []) or callable(default) or "[default: " in shown
            assert said, (name, one.name)
            assert one.param_type_name == "option" or re.fullmatch("[A-Z]+", one.metavar or ""), (name, one.name)


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["serve", "--port", "x"], ["config", "nonsense"], ["demo", "--turns", "0"]]
)
def test_wrong_usage_exits_with_2(program, arguments):
    assert program(*arguments).exit_code == 2


def test_errors_are_one_line_with_exit_code_2_or_1(program):
    Path("agentspec.toml").write_text("[server]\nport = 'x'\n")
    wrong = program("serve")
    assert (wrong.exit_code, wrong.stderr.count("\n")) == (2, 1) and wrong.stderr.startswith(
        "agentspec: agentspec.toml: "
    )
    failed = program("model", "fetch", "smollm")
    assert (failed.exit_code, failed.stderr.count("\n")) == (1, 1) and "smollm2-135m" in failed.stderr


def test_a_missing_extra_says_how_to_install_it(program, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bm25s", None)
    result = program("kb", "build", __file__, "--out", "kb", "--kind", "bm25")
    assert result.exit_code == 1 and "needs bm25s; in a checkout of agentspec, run: pip install '.[retrieval]'" in (
        result.stderr
    )


@pytest.mark.model
def test_a_ready_model_is_listed_as_such(program, default_model, monkeypatch):
    monkeypatch.setenv("AGENTSPEC_MODELS", str(default_model.folder.parent.parent))
    assert "smollm2-135m   ready" in program("model", "fetch").output


# `agentspec serve`, which the tests of the gateway start for real ----------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "a", "--upstream", "http://b"), "give --model or --upstream, not both"),
        (("--upstream", "nope"), "command line: backends.upstream.base_url = 'nope'"),
        (("--model", "./absent", "--no-store"), "./absent"),
        (("smollm2-135m",), "write --model smollm2-135m"),
    ],
)
def test_serve_refuses_options_that_cannot_work(program, arguments, says):
    result = program("serve", "--port", 0, *arguments)
    assert result.exit_code in (1, 2) and says in result.output + result.stderr


# `agentspec demo` ----------------------------------------------------------------------------------------------------


def test_the_demo_compares_sessions_of_an_agent(program, tiny_model: Path) -> None:
    result = program("demo", "--model", tiny_model, "--sessions", 2, "--turns", 1, "--max-tokens", 8)
    assert result.exit_code == 0, result.output
    title, heading, *rows, compared, last = result.output.splitlines()
    assert title.startswith("2 sessions of 1 call, with prompts of ")
    assert heading.split()[2:] == ["s/session", "tokens/s", "tok/forward", "speed-up", "same"]
    for row, variant in zip(rows, ("transformers", "agentspec", "agentspec, again"), strict=True):
        *_, speed, forwards, faster, same = row.removeprefix(variant).split()
        assert float(speed) > 0 and faster.endswith("x") and same == "2/2", row
        assert forwards == "-" if variant == "transformers" else float(forwards) >= 1
    assert "reads each prompt from the start" in compared
    assert last == "Answers: identical to those of transformers, token by token, in all 4 calls."


# `agentspec verify` --------------------------------------------------------------------------------------------------


def test_verify_reports_exact_and_the_counts(program, tiny_model: Path, tmp_path: Path) -> None:
    result = program("verify", "--model", tiny_model, "--limit", 2, "--max-tokens", 8)
    assert result.exit_code == 0, result.output
    assert f"{tiny_model}, float32 on cpu: 4 answers, half greedy, half sampled" in result.output
    for way in ("on, cold", "on, warm", "on, side by side"):
        assert f"  {way}: 4 of 4 equal those without speculation" in result.output
    assert result.output.rstrip().endswith("exact")
    refused = program("verify", "--model", tiny_model, "--max-tokens", 2048)
    assert refused.exit_code == 2
    assert "no prompt leaves room for 2048 of the model's 2048 tokens" in refused.output


def test_verify_reads_recorded_calls(program, tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    delta = [{"role": "user", "content": "hello"}]
    file.write_text(json.dumps({"session": "a", "messages_delta": delta, "response": "hi"}) + "\n")
    result = program("verify", "--model", tiny_model, "--calls", file, "--max-tokens", 4, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["exact"] and record["divergences"] == []
    assert {way: len(answers) for way, answers in record["answers"].items()} == {
        "off": 2, "on, cold": 2, "on, warm": 2, "on, side by side": 2
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("verify", "--calls", "empty"), "empty"),
        (("verify", "--calls", "."), "is a directory"),
        (("bench", "decode", "--json", "absent/x.json"), "absent is not a folder that can be written to"),
        (("bench", "agent", "--json", "."), "is a folder: name a file"),
        (("knn", "build", "empty", "--out", "empty"), "is a file"),
        (("knn", "build", "empty", "--out", "/proc/self/store"), "/proc/self cannot be written to"),
        (("kb", "build", "empty", "--out", "/proc/self/kb"), "/proc/self cannot be written to"),
        (("kb", "build", "empty", "--out", "."), "exists and is no index"),
    ],
)
def test_bad_paths_are_refused_before_torch_is_imported(
    program, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.setitem(sys.modules, "agentspec.backends.torch", None)  # importing it would fail
    Path("empty").write_text("")
    result = program(*arguments)
    assert result.exit_code in (1, 2) and said in " ".join(result.output.replace("│", "").split())


def test_verify_shows_a_difference_and_exits_with_1(program, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentspec.backends.torch import exactness

    async def verify(*_: object) -> exactness.ExactnessReport:
        parted = exactness.TokenDivergence("on, cold", 1, 2, 65, 66, 0.25, 0.26, 1e-3)
        return exactness.ExactnessReport({"off": [[1], [2]], "on, cold": [[1], [3]]}, [parted])

    monkeypatch.setattr(exactness, "check_exactness", verify)  # no engine of ours parts
    result = program("verify", "--model", tiny_model, "--limit", 1)
    assert result.exit_code == 1
    assert "on, cold: 1 of 2 equal those without speculation" in result.output
    assert "on, cold, answer 2, token 3: " in result.output
    assert "+0.25 token by token, +0.26 in one forward, no near-tie (limit 0.001)" in result.output
    assert "NOT exact" in result.output


# `agentspec bench`, whose measurements have tests of their own -------------------------------------------------------


@pytest.mark.slow
@pytest.mark.counted
def test_bench_gpu_runs_without_traces(program, tmp_path):
    out = tmp_path / "out.json"
    result = program("bench", "gpu", "--shape", "tiny", "--device", "cpu", "--questions", 2, "--json", out)
    assert result.exit_code == 0, result.output
    assert program("bench", "gpu", "--traces", __file__).exit_code == 2  # without a tokenizer
    assert "on CPU" in result.output and "left out: recorded answers: no traces" in result.output
    assert json.loads(out.read_text())["shape"] == "tiny"


def test_bench_retrieval_refuses_fewer_than_7_questions(program, tmp_path):
    file = tmp_path / "one.jsonl"
    file.write_text('{"id": "1", "question": "why?", "text": "because"}\n')
    result = program("bench", "retrieval", "--corpus", file, "--questions", file, "--count", 3)
    assert result.exit_code == 2 and "at least 7 questions are needed" in result.output
    result = program("bench", "retrieval", "--corpus", file, "--questions", file)
    assert result.exit_code == 2 and f"{file} holds 1 line, and at least 7 are needed" in result.output


def test_bench_tools_predicts_calls_of_recorded_sessions(program, tmp_path):
    lines, out = [], tmp_path / "out.json"
    for number in range(12):
        call = json.dumps({"name": "get_user", "arguments": {"id": f"ann_{number}"}})
        said = [{"role": "user", "content": f"I am ann_{number}"}]
        lines.append(json.dumps({"session": str(number), "messages_delta": said, "response": call}))
    (tmp_path / "sessions.jsonl").write_text("\n".join(lines))
    result = program("bench", "tools", tmp_path / "sessions.jsonl", "--json", out)
    assert result.exit_code == 0 and "Calls predicted" in result.output, result.output
    data = json.loads(out.read_text())["files"]["sessions.jsonl"]
    assert data["top_1"] <= data["top_3"]


def placement(program, *chosen):
    calls = Path(__file__).resolve().parents[2] / "examples" / "calls.jsonl"
    sizes = ("--engines", 2, "--sessions", 40, "--seeds", 2, "--rate", 2)
    return program("bench", "placement", calls, *sizes, *chosen)


def test_bench_placement_compares_policies_and_prints_every_parameter(program, tmp_path: Path) -> None:
    scenario, out = tmp_path / "scenario.json", tmp_path / "out.json"
    scenario.write_text('{"pause": 0.5, "costs": {"step": 0.03}}')
    chosen = ("--policy", "round_robin,workflow", "--order", "arrival,deadline", "--scenario", scenario)
    done = placement(program, *chosen, "--json", out)
    assert done.exit_code == 0, done.output
    for said in ("rate = 2", "pause = 0.5", "step = 0.03", "workflow", "deadline", "Medians of 2 seeds"):
        assert said in done.output
    written = json.loads(out.read_text())
    assert written["seeds"] == [0, 1] and written["scenario"]["costs"]["step"] == 0.03
    assert [(one["policy"], one["order"]) for one in written["variants"]][-1] == ("workflow", "deadline")
    assert all(figures["sessions"] == 36 for one in written["variants"] for figures in one["figures"])


@pytest.mark.parametrize(
    ("given", "says"),
    [(("--policy", "best"), "round_robin"), (("--policy", ","), "round_robin"), (("--order", ""), "arrival")],
)
def test_bench_placement_refuses_unknown_policies_and_orders(program, given: tuple[str, ...], says: str) -> None:
    done = placement(program, *given)
    assert done.exit_code == 2 and says in done.output
