"""The run over engines from end to end: who is asked when, what counts, and what becomes of engines that fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentspec.backends.vllm.drafting import ServerDrafter
from agentspec.benchmarks.report import print_report
from agentspec.benchmarks.vllm import bench
from agentspec.benchmarks.vllm.bench import ForcedPart, ForcedPlan, run_forced
from agentspec.benchmarks.vllm.engine import find_environment
from agentspec.benchmarks.vllm.report import ForcedReport
from agentspec.benchmarks.vllm.worker import learn_call
from agentspec.cache import SuffixCache

FAKE = Path(__file__).with_name("fake_worker.py")
WORDS = "check the order again please and then"
ANSWER = f"{WORDS} {WORDS}"
LONG = 3600.0  # seconds that no stand-in needs
ENVIRONMENT = find_environment(Path(__file__).parents[3])


@pytest.fixture
def plan(tmp_path: Path, tokenizer: Path, calls_of: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes plans whose engines are stand-ins; `wrong` says what each does wrong."""
    monkeypatch.setattr(bench, "require_vllm", lambda python: None)
    monkeypatch.setattr(bench, "CONTEXTS", (200,))
    monkeypatch.setenv("FAKE_TURNS", str(tmp_path / "turns"))
    traces = (calls_of("airline", [ANSWER] * 10), calls_of("sql", [ANSWER] * 3))

    def made(*names: str, wrong: dict[str, str] | None = None, **changed: Any) -> ForcedPlan:
        monkeypatch.setenv("FAKE", json.dumps(wrong or {}))
        given: dict[str, Any] = {"traces": traces, "tokenizer": tokenizer, "learned": 2, "seconds": LONG}
        given |= {"device": "cpu", "shape": "tiny", "start": LONG, "patience": LONG, "worker": [str(FAKE)], **changed}
        return ForcedPlan(Path(sys.executable), variants=names, **given)

    return made


def printed(report: ForcedReport) -> str:
    console = Console(record=True, width=200)
    print_report(report, console)
    return console.export_text()


def test_engines_take_turns_in_rotating_order_and_only_ours_learn(plan: Any, tmp_path: Path) -> None:
    report = run_forced(plan("agentspec", "ngram_gpu", parts=[ForcedPart.calls]))
    found = (tmp_path / "turns").read_text().splitlines()
    assert found[0] == "agentspec: bench_learn"
    calls = [turn.split(": 1 prompts ") for turn in found if turn.count(" ") > 2]
    names, sessions = zip(*calls, strict=True)
    first, second, third = "off agentspec ngram_gpu", "agentspec ngram_gpu off", "ngram_gpu off agentspec"
    assert " ".join(names[:15]) == f"{first} {first} {second} {second} {third}", "in each file"
    assert sessions[::3][:5] == ("airline2", "sql1", "airline3", "sql2", "airline4"), "what is learned is not timed"
    assert len(report.calls) == 8 + 2 and report.left_out == [] and report.sound
    assert report.names == ["off", "agentspec", "ngram_gpu"]
    whole, after = (report.ratio("agentspec", "off", report.calls, part) for part in ("seconds", "decode"))
    assert whole is not None and after is not None and (after.median, after.low, after.pairs) == (4.0, 4.0, 10)
    assert whole.median == pytest.approx(16 / 4.75), "15 tokens, and a second for the first of them"
    assert report.ratio("agentspec", "off", report.calls[:6], "seconds") is None, "too few for an interval"
    assert report.ratio("off", "off", report.calls, "seconds") is None
    assert [len(runs) for runs in report.copied[200].values()] == [3, 3, 3], "the first round is not counted"
    text = printed(report)
    assert "all: 10 calls, forced" in text and "4.00x [4.00, 4.00]" in text and "copying 96 tokens" in text
    assert json.dumps(report.data())


def test_answers_are_compared_with_those_without_drafts(plan: Any) -> None:
    report = run_forced(plan("agentspec", "ngram_gpu", wrong={"ngram_gpu": "lies"}, parts=[ForcedPart.answers]))
    assert [len(found) for found in report.answers.values()] == [4, 4, 4]
    assert {str(turn.same) for turn in report.answers["agentspec"].values()} == {"16", "4"}
    assert [turn.same for turn in report.answers["ngram_gpu"].values()] == [15, 15, 0, 15]
    failed = [name for name, holds in report.checks.items() if not holds]
    assert len(failed) == 4 and all(name.startswith("ngram_gpu: answers equal") for name in failed)
    assert "FAILED: ngram_gpu: answers equal those of off, second turn" in printed(report)


@pytest.mark.parametrize(
    ("wrong", "reason"), [("fails", "no such method"), ("talks", "no JSON"), ("ends", "its process ended")]
)
def test_an_engine_that_fails_is_told_with_its_log_and_left_out(plan: Any, wrong: str, reason: str) -> None:
    report = run_forced(plan("agentspec", "Arctic", wrong={"Arctic": wrong}))
    for part in ForcedPart:
        told = report.failed[f"Arctic, {part}"]
        assert reason in told and "a line of the log" in told
    assert list(report.failed) == ["Arctic, answers", "Arctic, calls"]
    assert report.names == list(report.answers) == list(report.copied[200]) == ["off", "agentspec"]
    assert report.sound and len(report.calls) == 10
    assert "did not run: Arctic, calls" in printed(report)


def test_a_call_is_learned() -> None:
    learned = {"session": "s", "prompt": list(range(40)), "response": list(range(100, 140))}
    with SuffixCache.open() as cache:
        drafter = ServerDrafter(lambda state, prompt: cache.request(prompt), 1000)
        assert learn_call(drafter, learned) == 1
        drafter.close()
        with cache.request([*range(30, 40), *range(100, 110)]) as request:
            assert list(request.draft(4).tokens) == [110, 111, 112, 113]


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(ENVIRONMENT is None, reason="no vLLM: run .ci/vllm-env, or set AGENTSPEC_VLLM_ENV")
def test_real_engines(calls_of: Any, tokenizer: Path) -> None:
    assert ENVIRONMENT is not None
    calls = calls_of("airline", [ANSWER] * 12)
    plan = ForcedPlan(
        ENVIRONMENT / "bin" / "python", "cpu", "tiny", ["agentspec"], traces=[calls], tokenizer=tokenizer, learned=4,
        seconds=LONG, start=400.0, patience=200.0,
    )  # fmt: skip
    report = run_forced(plan)
    assert report.failed == {} and report.left_out == [] and report.sound, printed(report)
    assert len(report.calls) == 8 and report.names == ["off", "agentspec"]
    steps = {name: sum(call.runs[name].steps for call in report.calls) for name in report.names}
    assert steps["off"] == 8 * 14 and steps["agentspec"] < steps["off"] / 2
    for turn in ("first time", "again"):
        assert report.answers["agentspec"][turn].steps < report.answers["off"][turn].steps
