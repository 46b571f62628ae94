"""`agentspec reasoning eval`: what it reads, counts and refuses, with two endpoints that think by a script."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentspec.backends.base import Capabilities
from agentspec.benchmarks.reasoning.evaluation import PROMPTS, Problem
from agentspec.testing import Script
from agentspec.types import GenerateRequest
from tests.cli.conftest import Program
from tests.proxy.conftest import run_gateway
from tests.thinking_model import ThinkingModel

KNOWN = Capabilities(continue_final=True, logprobs=True)
NOBODY = "http://127.0.0.1:9"
PROBLEMS = [{"problem": "2+2?", "answer": "4"}, {"problem": "2+3?", "solution": "So \\boxed{5}."}]


class Solver(ThinkingModel):
    """Thinks two steps of three tokens; the base model is right at every problem, the small one only at the first."""

    def __init__(self, name: str) -> None:
        super().__init__(lambda text: f"{name} {'Answer: 4' if text else 'so'}\n\n", capabilities=KNOWN)
        self.name, self.interrupts = name, False

    def _respond(self, request: GenerateRequest) -> Script:
        said = super()._respond(request)
        if said != self._said:
            return said
        if self.interrupts and "2+2" in self.prompt_text(request):
            self.interrupts = False
            os.kill(os.getpid(), signal.SIGINT)
        return "\\boxed{5}" if "2+3" in self.prompt_text(request) and self.name == "base" else "\\boxed{4.0}"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Path, dict[str, Solver]]]:
    """A configuration of a base model and a small one behind servers, and the two."""
    models = {name: Solver(name) for name in ("base", "small")}
    with run_gateway({"m": models["base"]}) as one, run_gateway({"m": models["small"]}) as other:
        yield configured(tmp_path, one.url, other.url), models


def configured(folder: Path, base: str, small: str) -> Path:
    """A configuration with a base model and a small one at these addresses."""
    path, text = folder / "pair.toml", ""
    for name, url in (("base", base), ("small", small)):
        text += f'[backends.{name}]\nkind = "openai"\nbase_url = "{url}/v1"\nmodel = "m"\n'
    path.write_text(text + '[models.fast]\nstrategy = "specreason"\nbase = "base"\nsmall = "small"\n')
    return path


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in PROBLEMS))
    return path


def test_base_small_and_strategy_answer_the_same_problems(program: Program, pair: Any, problems: Path) -> None:
    config, models = pair
    done = program("reasoning", "eval", problems, "-c", config, "--samples", 2, "--thresholds", "5,9.5", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    rows = {row["arm"]: (row["answers"], row["accuracy"], row["delegated"]) for row in found["summary"]}
    assert rows == {
        "base alone": (4, 1.0, 0.0),
        "small alone": (4, 0.5, 0.0),
        "fast, threshold 5": (4, 1.0, 1.0),
        "fast, threshold 9.5": (4, 1.0, 0.0),
    }
    assert found["complete"] and len(found["answers"]) == 16 and found["summary"][2]["tokens"] > 6
    asked = {str(request.messages[0]["content"]) for request in models["small"].requests if request.messages}
    assert any("separate logical reasoning steps" in text and "Problem: 2+3?" in text for text in asked)
    sent = [one for model in models.values() for one in model.requests if "math problem" in str(one.messages)]
    assert sent and all(one.speculation and not one.store for one in sent)
    shown = program("reasoning", "eval", problems, "-c", config, "--limit", 1, "--at-once", 3, "--prompt", "boxed")
    assert shown.exit_code == 0 and "3 of 3 answers" in shown.stdout and "100.0%" in shown.stdout


def test_ctrl_c_reports_the_answers_so_far(program: Program, pair: Any, problems: Path) -> None:
    config, models = pair
    models["small"].interrupts = True  # its first answer is the second of all
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker of pytest-xdist ignores the signal
    try:
        done = program("reasoning", "eval", problems, "-c", config)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.exit_code == 1 and "1 of 6 answers" in done.stdout


@pytest.mark.parametrize(
    ("line", "given", "message"),
    [
        ({"problem": "x"}, (), 'problems.jsonl:1: no "answer" in it'),
        ({"answer": "x"}, (), 'no "problem" or "question"'),
        ({"question": "x", "choices": ["a", "b"], "answer": "c"}, (), "none of the choices"),
        (None, (), "holds no problems"),
        (PROBLEMS[0], ("--thresholds", "5,x"), "--thresholds"),
        (PROBLEMS[0], ("--thresholds=-1",), "numbers from 0 on"),
        (PROBLEMS[0], ("--model", "base"), "no model of a strategy that delegates thinking: fast"),
        (PROBLEMS[0], ("--prompt", "long"), "--prompt"),
    ],
)
def test_bad_problems_and_options_are_refused_before_a_model_is_asked(
    program: Program, tmp_path: Path, problems: Path, line: Any, given: tuple[str, ...], message: str
) -> None:
    problems.write_text("" if line is None else json.dumps(line))
    done = program("reasoning", "eval", problems, "-c", configured(tmp_path, NOBODY, NOBODY), *given)
    assert done.exit_code == 2 and message in " ".join(done.output.split()), done.output


GPQA = {"Question": "Q", "Correct Answer": " red", "Incorrect Answer 1": "blue", "Incorrect Answer 2": "green\n"}


@pytest.mark.parametrize(
    ("record", "answer"),
    [
        ({"id": 60, "problem": "P", "answer": "204", "url": "u"}, "204"),  # AIME
        ({"ID": "2024-I-1", "Problem": "P", "Solution": "s", "Answer": 204}, "204"),
        ({"problem": "P", "level": "Level 5", "solution": "by \\boxed{\\frac{1}{2}}"}, "\\frac{1}{2}"),  # MATH
        ({"question": "Q", "answer": "3 + 4 = 7\n#### 7"}, "7"),  # GSM8K
        ({"question": "Q", "choices": ["a", "b", "c"], "correct": 1}, "B"),
        ({"question": "Q", "choices": ["a", "b", "c"], "answer": "C"}, "C"),
        ({"question": "Q", "options": {"A": "x", "B": "y"}, "answer": "(B)"}, "B"),
    ],
)
def test_problems_are_read_as_the_public_sets_have_them(record: dict[str, Any], answer: str) -> None:
    problem = Problem.read(record)
    assert problem.answer == answer and all(problem.text in problem.prompt(preset) for preset in PROMPTS)


def test_the_position_of_the_right_choice_varies() -> None:
    read: Callable[[Any], Problem] = Problem.read
    found = [read({**GPQA, "Question": f"Q{n}"}) for n in range(40)]
    assert {one.answer for one in found} == {"A", "B", "C"} and all(
        one.choices["ABC".index(one.answer)] == "red" for one in found
    )
    assert "(C) " in found[0].prompt() and "single letter" in found[0].prompt() == found[0].prompt("gpqa")
    assert "letter of a choice" in found[0].prompt("boxed")
