"""Accuracy and latency of a SpecReason model against its threshold, on problems with known answers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentspec.config import Settings
from agentspec.errors import ConfigurationError, InvalidRequestError
from agentspec.reasoning.settings import SpecReasonSettings
from agentspec.runtime import Runtime
from agentspec.types import GenerateRequest, SamplingParams, StepSpeculation

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Problem:
    problem: str
    answer: str


@dataclass(frozen=True, slots=True)
class Solved:
    """One problem at one threshold. Tokens are those of the thinking."""

    correct: bool
    seconds: float
    steps: int
    proposed: int
    accepted: int
    base_tokens: int
    small_tokens: int
    spent_tokens: int


@dataclass(slots=True)
class Point:
    """All problems at one threshold; None is the base model alone, without drafts."""

    threshold: float | None
    solved: list[Solved] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "base alone" if self.threshold is None else f"{self.threshold:g}"

    @property
    def accuracy(self) -> float:
        return sum(one.correct for one in self.solved) / len(self.solved)

    @property
    def seconds(self) -> float:
        """Mean per problem."""
        return sum(one.seconds for one in self.solved) / len(self.solved)

    @property
    def base_share(self) -> float:
        """Of the tokens of thinking that were kept."""
        base = sum(one.base_tokens for one in self.solved)
        return base / max(1, base + sum(one.small_tokens for one in self.solved))

    @property
    def acceptance(self) -> float:
        return sum(one.accepted for one in self.solved) / max(1, sum(one.proposed for one in self.solved))


def read_problems(path: Path) -> list[Problem]:
    """Problems of a file of JSON lines. Raises `InvalidRequestError` naming the line that is none."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            found.append(Problem(str(record["problem"]), str(record["answer"])))
        except (ValueError, KeyError, TypeError):
            raise InvalidRequestError(f'{path}:{number}: want {{"problem": ..., "answer": ...}}') from None
    if not found:
        raise InvalidRequestError(f"{path} holds no problems")
    return found


async def measure_curve(
    settings: Settings,
    model: str,
    problems: Sequence[Problem],
    thresholds: Sequence[float],
    temperature: float = 0.0,
    max_tokens: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
    **given: Any,
) -> list[Point]:
    """Solve every problem at every threshold, the thresholds in turn so that a busy minute hits all alike.

    `given` goes to the `Runtime`. Raises `ConfigurationError` if `model` has no threshold.
    """
    strategy = settings.models.get(model)
    if not isinstance(strategy, SpecReasonSettings):
        raise ConfigurationError(f'{model!r} has no threshold: name a [models.NAME] with strategy = "specreason"')
    names = {f"{model}@{threshold:g}": threshold for threshold in thresholds}
    variants = {name: strategy.model_copy(update={"threshold": threshold}) for name, threshold in names.items()}
    tried = settings.model_copy(update={"models": {**settings.models, **variants}})
    points = {model: Point(None), **{name: Point(threshold) for name, threshold in names.items()}}
    async with Runtime(tried, **given) as runtime:
        for number, problem in enumerate(problems, 1):
            for name, point in points.items():
                progress(f"problem {number} of {len(problems)}, {point.name}")
                sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens)
                request = _request(name, problem, sampling, speculation=point.threshold is not None)
                point.solved.append(await _solve(runtime, request, problem.answer))
    return list(points.values())


def _request(model: str, problem: Problem, sampling: SamplingParams, *, speculation: bool) -> GenerateRequest:
    messages = [{"role": "user", "content": problem.problem}]
    return GenerateRequest(model, messages=messages, sampling=sampling, speculation=speculation, store=False)


async def _solve(runtime: Runtime, request: GenerateRequest, answer: str) -> Solved:
    began, text, told = time.perf_counter(), "", None
    async for delta in runtime.generate(request):
        text += delta.text + delta.extra.get("reasoning", "")
        told = delta.speculation or told
    seconds = time.perf_counter() - began
    assert isinstance(told, StepSpeculation)
    return Solved(
        correct=is_correct(text, answer),
        seconds=seconds,
        steps=told.steps,
        proposed=told.proposed_steps,
        accepted=told.accepted_steps,
        base_tokens=told.kept_tokens["base"],
        small_tokens=told.kept_tokens["small"],
        spent_tokens=sum(told.spent_tokens.values()),
    )


def is_correct(text: str, answer: str) -> bool:
    """Whether the last boxed expression of `text`, or else its last number, is the answer."""
    boxed = re.findall(r"boxed\{([^{}]*)\}", text)
    numbers = boxed[-1:] or _NUMBER.findall(text)[-1:]
    return bool(numbers) and _canonical(numbers[0]) == _canonical(answer)


def _canonical(text: str) -> str | float:
    plain = text.strip().strip("$").replace(",", "")
    try:
        return float(plain)
    except ValueError:
        return plain


def print_curve(points: Sequence[Point], console: Console) -> None:
    table = Table(title=f"{len(points[0].solved)} problems")
    for heading in ("threshold", "accuracy", "seconds", "acceptance", "base share"):
        table.add_column(heading, justify="right")
    for point in points:
        figures = (point.accuracy, point.seconds, point.acceptance, point.base_share)
        table.add_row(point.name, *(f"{figure:.2f}" for figure in figures))
    console.print(table)
    best = max(point.accuracy for point in points)
    chosen = min((point for point in points if point.accuracy == best), key=lambda point: point.seconds)
    console.print(f"Fastest of the most accurate: {'' if chosen.threshold is None else 'threshold = '}{chosen.name}")


def write_curve(points: Sequence[Point], path: Path) -> None:
    path.write_text(json.dumps([asdict(point) for point in points], indent=2))


def write_plot(points: Sequence[Point], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.plot([point.seconds for point in points], [point.accuracy for point in points], "o-")
    for point in points:
        axes.annotate(point.name, (point.seconds, point.accuracy), textcoords="offset points", xytext=(6, 6))
    axes.set_xlabel("seconds a problem")
    axes.set_ylabel("accuracy")
    axes.set_ylim(-0.05, 1.05)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
