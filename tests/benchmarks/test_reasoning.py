from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentspec.backends.settings import TorchSettings
from agentspec.benchmarks import reasoning as bench
from agentspec.benchmarks.memo import Memo
from agentspec.benchmarks.reasoning_curve import Curve, Plan, Problem, is_correct, measure_curve, read_problems
from agentspec.benchmarks.reasoning_curve_report import print_curve, write_plot
from agentspec.benchmarks.reasoning_report import print_report, write_json
from agentspec.benchmarks.reasoning_report import write_plot as write_prediction
from agentspec.errors import ConfigurationError, InvalidRequestError, UpstreamError
from agentspec.reasoning.delegation.model_role import ModelRole
from agentspec.reasoning.settings import SpecReasonSettings
from agentspec.settings.load import ModelSettings, Settings
from agentspec.testing import Answer, FakeBackend, ThinkingModel
from agentspec.types import GenerateRequest


def test_pipelining_hides_the_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "STEPS", 5)
    monkeypatch.setattr(bench, "STEP_SECONDS", 0.08)
    figure = bench.pipelining(1.0, rounds=1)
    assert figure.unit == "x" and figure.value > 1.05


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


def test_the_report_says_what_was_missed(tmp_path: Path) -> None:
    figures = [bench.Figure("a", 1.0, "ms", 3.0), bench.Figure("b", 1.0, "x", 1.15, at_least=True)]
    speeds = bench.Speeds(10.0, 100.0, 0.1)
    report = bench.Report(figures, bench.predict([10], speeds, [0.0, 1.0]))
    console = Console(record=True, width=100)
    print_report(report, console)
    assert not report.met and "MISSED" in (said := console.export_text()) and "1.4 to 3 times" in said
    write_json(report, tmp_path / "out.json", {"cpus": 2})
    assert json.loads((tmp_path / "out.json").read_text())["figures"][0]["name"] == "a"
    write_prediction(report, tmp_path / "out.svg")
    assert (tmp_path / "out.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("text", "answer", "correct"),
    [
        ("so it is \\boxed{18}. Then 3", "18", True),
        ("it makes 1,024 in all", "1024", True),
        ("18.0 dollars", "18", True),
        ("first 18, then 19", "18", False),
        ("\\boxed{x + 1}", "x + 1", True),
        ("no idea", "18", False),
    ],
)
def test_answers_are_compared_as_numbers(text: str, answer: str, correct: bool) -> None:
    assert is_correct(text, answer) is correct


def solvers(**options: Any) -> dict[str, ThinkingModel]:
    """The small model is wrong in every step, which the judge sees: accuracy comes with the threshold."""

    def model(answer: int) -> ThinkingModel:
        return ThinkingModel(
            lambda thinking: Answer(f"{'Answer: ' if thinking else ''}{answer}\n\n", first_latency=0.01),
            score=lambda step: "4",
            answer="So that is it.",
            **options,
        )

    return {"large": model(4), "tiny": model(5)}


SETTINGS = Settings(
    backends={"large": TorchSettings(model="l"), "tiny": TorchSettings(model="t")},
    models={"fast": SpecReasonSettings(base="large", small="tiny"), "plain": ModelSettings(backend="large")},
)
PROBLEMS = [Problem("Two plus two?", "4"), Problem("And two?", "4")]


@pytest.mark.anyio
@pytest.mark.parametrize("reuse", [True, False])
async def test_the_curve_of_a_threshold(tmp_path: Path, reuse: bool) -> None:
    curve = Curve.begun(Plan("fast", (0, 7), reuse=reuse))
    await measure_curve(SETTINGS, curve, PROBLEMS, backends=solvers())
    points = curve.points
    found = [(point.threshold, point.accuracy, point.base_share, point.acceptance) for point in points]
    assert found == [(None, 1.0, 1.0, 0.0), (0, 0.0, 0.0, 1.0), (7, 1.0, 1.0, 0.0)]
    assert all(one.seconds > 0.02 for point in points for one in point.solved)
    console = Console(record=True, width=100)
    print_curve(curve, console)
    assert "base alone" in (said := console.export_text()) and "Fastest of the most accurate" in said
    assert ("calls" in said) is reuse
    write_plot(points, tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").stat().st_size > 1000
    with pytest.raises(ConfigurationError, match="no threshold"):
        await measure_curve(SETTINGS, Curve.begun(Plan("plain", (0,))), PROBLEMS)


@pytest.mark.anyio
async def test_what_thresholds_share_is_asked_once_and_timed_alike() -> None:
    """Above 9 nothing is kept, whatever the number: the second such threshold asks no model anything."""
    fakes = solvers()
    curve = Curve.begun(Plan("fast", (9.5, 10)))
    await measure_curve(SETTINGS, curve, PROBLEMS[:1], backends=fakes)
    above, again = curve.points[1:]
    assert above.solved == again.solved and curve.remembered > curve.calls / 2
    asked = [repr(request) for fake in fakes.values() for request in fake.requests]
    assert len(asked) == len(set(asked)) == curve.calls
    drawn = Curve.begun(Plan("fast", (9.5, 10), temperature=0.5))
    await measure_curve(SETTINGS, drawn, PROBLEMS[:1], backends=solvers())
    assert drawn.calls == drawn.remembered == 0


@pytest.mark.anyio
async def test_a_measurement_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    path, plan = tmp_path / "curve.json", Plan("fast", (0, 7), {"step_tokens": 8}, max_tokens=64)
    begun = Curve.begun(plan)
    await measure_curve(SETTINGS, begun, PROBLEMS[:1], save=lambda curve: curve.write(path), backends=solvers())
    fakes, resumed = solvers(), Curve.read(path, plan)
    assert resumed == begun
    await measure_curve(SETTINGS, resumed, PROBLEMS, backends=fakes)
    assert resumed.problems == 2 and resumed.points[0].solved[0] == begun.points[0].solved[0]
    assert all("And two?" in fake.prompt_text(request) for fake in fakes.values() for request in fake.requests)
    with pytest.raises(InvalidRequestError, match="other options"):
        Curve.read(path, replace(plan, thresholds=(0, 8)))
    path.write_text("[]")
    with pytest.raises(InvalidRequestError, match="no curve"):
        Curve.read(path, plan)


@pytest.mark.anyio
async def test_a_call_that_fails_is_not_remembered() -> None:
    answers = iter([UpstreamError("gone"), "one\n\n"])
    memo = Memo()
    model = memo.roles({"base": ModelRole("base", FakeBackend(lambda request: next(answers)), "m")})["base"]
    with pytest.raises(UpstreamError):
        [delta async for delta in model.backend.generate(GenerateRequest("m", text="?"))]
    for _ in range(2):
        said = "".join([delta.text async for delta in model.backend.generate(GenerateRequest("m", text="?"))])
        assert said == "one\n\n"
    assert (memo.made, memo.remembered) == (1, 1)


def test_a_line_that_is_no_problem_is_named(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"problem": "?"}\n')
    with pytest.raises(InvalidRequestError, match=r"problems.jsonl:1: want"):
        read_problems(path)
    path.write_text("\n")
    with pytest.raises(InvalidRequestError, match="no problems"):
        read_problems(path)
