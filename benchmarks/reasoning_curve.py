"""Accuracy and latency of a SpecReason model against its threshold, on problems with known answers."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from agentspec.benchmarks.memo import Memo
from agentspec.errors import ConfigurationError, InvalidRequestError
from agentspec.reasoning.delegation.backend import DelegationBackend
from agentspec.reasoning.settings import SpecReasonSettings
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.types import GenerateRequest, SamplingParams, StepSpeculation

EVERY = 1 << 31  # first steps of the base model's, so that it thinks alone with all that speeds it up otherwise
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Problem:
    problem: str
    answer: str


@dataclass(frozen=True, slots=True)
class Solved:
    """One problem at one threshold. Tokens are those of the thinking; `seconds` is explained at `Plan.reuse`."""

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


@dataclass(frozen=True, slots=True)
class Plan:
    """What is tried: `[models.model]` at each threshold, its other settings changed as `changes` says.

    With `reuse` a model is not asked twice for the same: thresholds share the beginning of their thinking. Seconds are
    then those of the calls when they were made, one after another, also where the model is `pipelined`. Without it
    every call is made and the wall clock counts. Answers that are drawn are never reused.
    """

    model: str
    thresholds: tuple[float, ...]
    changes: Mapping[str, int] = field(default_factory=dict)
    temperature: float = 0.0
    max_tokens: int | None = None
    reuse: bool = True

    @property
    def reuses(self) -> bool:
        return self.reuse and self.temperature == 0

    def settings(self, strategy: SpecReasonSettings, threshold: float | None) -> SpecReasonSettings:
        """The strategy's settings at one threshold."""
        knob = {"first_steps": EVERY} if threshold is None else {"threshold": threshold}
        unpipelined = {"pipelined": False} if self.reuses else {}
        return strategy.model_copy(update={**self.changes, **unpipelined, **knob})


@dataclass(slots=True)
class Curve:
    """What was measured so far: all points have the same problems behind them."""

    plan: Plan
    points: list[Point]
    calls: int = 0
    remembered: int = 0

    @classmethod
    def begun(cls, plan: Plan) -> Curve:
        return cls(plan, [Point(threshold) for threshold in (None, *plan.thresholds)])

    @property
    def problems(self) -> int:
        return min(len(point.solved) for point in self.points)

    def write(self, path: Path) -> None:
        """Whole or not at all, so that a run which is stopped can go on from the file."""
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(asdict(self), indent=2))
        part.replace(path)

    @classmethod
    def read(cls, path: Path, plan: Plan) -> Curve:
        """The beginning of the same measurement. Raises `InvalidRequestError` if `path` holds another one's."""
        try:
            kept = json.loads(path.read_text())
            same = kept["plan"] == json.loads(json.dumps(asdict(plan)))
            points = [Point(one["threshold"], [Solved(**solved) for solved in one["solved"]]) for one in kept["points"]]
            found = cls(plan, points, kept["calls"], kept["remembered"])
        except (ValueError, KeyError, TypeError):
            raise InvalidRequestError(f"{path} holds no curve: name another file") from None
        if not same:
            raise InvalidRequestError(f"{path} was measured with other options: repeat those, or name another file")
        return found


def read_problems(path: Path) -> list[Problem]:
    """Problems of a file of JSON lines, plain or gzip-compressed. Raises `InvalidRequestError` naming what is none."""
    found = []
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
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
    curve: Curve,
    problems: Sequence[Problem],
    *,
    progress: Callable[[str], None] = lambda text: None,
    save: Callable[[Curve], None] = lambda curve: None,
    **given: Any,
) -> None:
    """Solve the problems that `curve` does not have yet at every threshold; `save` hears of each that is done.

    The thresholds take turns, so that a busy minute hits all alike. `given` goes to the `Runtime`. Raises
    `ConfigurationError` if the plan's model has no threshold.
    """
    plan = curve.plan
    strategy = settings.models.get(plan.model)
    if not isinstance(strategy, SpecReasonSettings):
        raise ConfigurationError(f'{plan.model!r} has no threshold: name a [models.NAME] with strategy = "specreason"')
    tried = {point.name: plan.settings(strategy, point.threshold) for point in curve.points}
    async with Runtime(settings, **given) as runtime:
        built = runtime.route(plan.model).backend
        assert isinstance(built, DelegationBackend)
        for number, problem in enumerate(problems[curve.problems :], curve.problems + 1):
            memo = Memo()
            roles = memo.roles(built.roles) if plan.reuses else built.roles
            solved = []
            for point in curve.points:
                progress(f"problem {number} of {len(problems)}, {point.name}")
                backend = replace(built, settings=tried[point.name], roles=roles, traces=None)
                solved.append(await _solve(backend, problem, plan, memo if plan.reuses else None))
            for point, one in zip(curve.points, solved, strict=True):
                point.solved.append(one)
            curve.calls += memo.made
            curve.remembered += memo.remembered
            save(curve)


async def _solve(backend: DelegationBackend, problem: Problem, plan: Plan, memo: Memo | None) -> Solved:
    sampling = SamplingParams(temperature=plan.temperature, max_tokens=plan.max_tokens)
    messages = [{"role": "user", "content": problem.problem}]
    request = GenerateRequest(plan.model, messages=messages, sampling=sampling, store=False)
    before, began, told = memo.seconds if memo else 0.0, time.perf_counter(), None
    thinking = answer = ""
    async for delta in backend.generate(request):
        thinking += delta.extra.get("reasoning", "")
        answer += delta.text
        told = delta.speculation or told
    seconds = memo.seconds - before if memo else time.perf_counter() - began
    assert isinstance(told, StepSpeculation)
    return Solved(
        correct=is_correct(f"{thinking}\n{answer}", problem.answer),
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
