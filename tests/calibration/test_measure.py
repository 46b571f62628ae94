from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentspec.backends.settings import TorchSettings
from agentspec.calibration.curve import CurvePlan, ThresholdCurve, print_curve, write_plot
from agentspec.calibration.measure import Problem, is_correct, measure_curve, read_problems
from agentspec.errors import ConfigurationError, InvalidRequestError
from agentspec.reasoning.settings import SpecReasonSettings
from agentspec.settings.load import ModelSettings, Settings
from agentspec.testing import Answer, ThinkingModel


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
    curve = ThresholdCurve.begun(CurvePlan("fast", (0, 7), reuse=reuse))
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
        await measure_curve(SETTINGS, ThresholdCurve.begun(CurvePlan("plain", (0,))), PROBLEMS)


@pytest.mark.anyio
async def test_what_thresholds_share_is_asked_once_and_timed_alike() -> None:
    """Above 9 nothing is kept, whatever the number: the second such threshold asks no model anything."""
    fakes = solvers()
    curve = ThresholdCurve.begun(CurvePlan("fast", (9.5, 10)))
    await measure_curve(SETTINGS, curve, PROBLEMS[:1], backends=fakes)
    above, again = curve.points[1:]
    assert above.solved == again.solved and curve.remembered > curve.calls / 2
    asked = [repr(request) for fake in fakes.values() for request in fake.requests]
    assert len(asked) == len(set(asked)) == curve.calls
    drawn = ThresholdCurve.begun(CurvePlan("fast", (9.5, 10), temperature=0.5))
    await measure_curve(SETTINGS, drawn, PROBLEMS[:1], backends=solvers())
    assert drawn.calls == drawn.remembered == 0


@pytest.mark.anyio
async def test_a_measurement_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    path, plan = tmp_path / "curve.json", CurvePlan("fast", (0, 7), {"step_tokens": 8}, max_tokens=64)
    begun = ThresholdCurve.begun(plan)
    await measure_curve(SETTINGS, begun, PROBLEMS[:1], save=lambda curve: curve.write(path), backends=solvers())
    fakes, resumed = solvers(), ThresholdCurve.read(path, plan)
    assert resumed == begun
    await measure_curve(SETTINGS, resumed, PROBLEMS, backends=fakes)
    assert resumed.problems == 2 and resumed.points[0].solved[0] == begun.points[0].solved[0]
    assert all("And two?" in fake.prompt_text(request) for fake in fakes.values() for request in fake.requests)
    with pytest.raises(InvalidRequestError, match="other options"):
        ThresholdCurve.read(path, replace(plan, thresholds=(0, 8)))
    path.write_text("[]")
    with pytest.raises(InvalidRequestError, match="no curve"):
        ThresholdCurve.read(path, plan)


def test_a_line_that_is_no_problem_is_named(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"problem": "?"}\n')
    with pytest.raises(InvalidRequestError, match=r"problems.jsonl:1: want"):
        read_problems(path)
    path.write_text("\n")
    with pytest.raises(InvalidRequestError, match="no problems"):
        read_problems(path)
