from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentspec.benchmarks import reasoning as bench
from agentspec.benchmarks.report import Figure, print_report, write_json
from agentspec.errors import ConfigurationError, InvalidRequestError


def test_pipelining_hides_the_judge(monkeypatch: pytest.MonkeyPatch, in_virtual_time: Any) -> None:
    monkeypatch.setattr(asyncio, "run", in_virtual_time)
    figure = bench.pipelining(1.0, rounds=1)
    again = bench.pipelining(1.0, rounds=1)
    assert figure.unit == "x" and figure.value == again.value > 1.15


def test_overhead_is_per_step_and_beyond_the_models() -> None:
    figure = bench.overhead(rounds=2)
    assert 0 < figure.value < 100 and figure.unit == "ms"


def test_predictions_follow_the_arithmetic() -> None:
    speeds = bench.Speeds(base=10.0, small=100.0, score_seconds=0.1)
    none, half, whole = bench.predict([10, 30], speeds, [0.0, 0.5, 1.0])
    assert whole.plain == pytest.approx(4.0 / (0.4 + 0.2))
    assert whole.pipelined == pytest.approx(4.0 / 0.4)
    assert none.plain == none.pipelined == pytest.approx(4.0 / 4.6)
    assert none.plain < half.plain < whole.plain


def test_the_acceptance_that_is_needed_gives_the_speedup() -> None:
    speeds = bench.Speeds(base=10.0, small=100.0, score_seconds=0.1)
    for found in bench.needed([10, 30], speeds, [1.0, 1.4, 3.0]):
        assert found.plain is not None and found.pipelined is not None and found.pipelined <= found.plain
        at_plain, at_pipelined = bench.predict([10, 30], speeds, [found.plain, found.pipelined])
        assert at_plain.plain == pytest.approx(found.speedup) == at_pipelined.pipelined
    (never,) = bench.needed([10], bench.Speeds(base=10.0, small=15.0, score_seconds=0.2), [1.4])
    assert never.plain is None
    (always,) = bench.needed([10], speeds, [0.1])
    assert always.plain == 0.0


def test_the_prediction_lies_in_the_published_band() -> None:
    """32.8 over 1.78 billion parameters, a score of two tokens, 18 tokens a step: 38 and 80 % of the steps accepted."""
    speeds = bench.Speeds(base=25.0, small=25.0 * 32.8 / 1.78, score_seconds=2 / 25.0)
    least, most = bench.predict([18], speeds, [0.38, 0.8])
    assert 0.9 * bench.PUBLISHED[0] < least.plain < least.pipelined < bench.PUBLISHED[1]
    assert bench.PUBLISHED[0] < most.plain < most.pipelined < 1.1 * bench.PUBLISHED[1]


def test_recorded_thinking_is_read_in_steps(tmp_path: Path) -> None:
    path = tmp_path / "thinking.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps({"response": "x" * 40 + "\n\n" + "y" * 8 + "\n\n\n\n"}) + "\n")
        file.write(json.dumps({"reasoning": "z", "response": "not this"}) + "\n")
    assert bench.read_steps(path) == [10, 2, 1]
    empty = tmp_path / "empty.jsonl"
    empty.write_text("{}\n")
    with pytest.raises(InvalidRequestError, match="no thinking"):
        bench.read_steps(empty)
    empty.write_text("\n[]\n")
    with pytest.raises(ConfigurationError, match=r"empty.jsonl:2: not a JSON object"):
        bench.read_steps(empty)


def test_the_report_says_what_was_missed(tmp_path: Path) -> None:
    figures = [Figure("a", 1.0, "ms", 3.0), Figure("b", 1.0, "x", 1.15, at_most=False)]
    report = bench.ReasoningReport(figures)
    report.foresee([10], bench.Speeds(10.0, 20.0, 0.1))
    assert len(report.predictions) == 11 and [n.speedup for n in report.needed] == [1.0, 1.4, 3.0]
    console = Console(record=True, width=100)
    print_report(report, console)
    assert not report.met and "MISSED" in (said := console.export_text()) and "1.4 to 3 times" in said
    assert "none is enough" in said
    write_json(report, tmp_path / "out.json", {"cpus": 2})
    assert json.loads((tmp_path / "out.json").read_text())["figures"][0]["name"] == "a"
    report.plot(tmp_path / "out.svg")
    assert (tmp_path / "out.svg").stat().st_size > 1000
