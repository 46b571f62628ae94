"""Solves problems with known answers at every threshold of a curve."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentspec.calibration.curve import CurvePlan, SolvedProblem, ThresholdCurve
from agentspec.calibration.memo import CallMemo
from agentspec.errors import ConfigurationError, InvalidRequestError
from agentspec.reasoning.delegation.backend import DelegationBackend
from agentspec.reasoning.settings import SpecReasonSettings
from agentspec.recordings.calls import BadLineError, json_object, lines
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.types import GenerateRequest, SamplingParams, StepSpeculation

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Problem:
    problem: str
    answer: str


def read_problems(path: Path) -> list[Problem]:
    """Read problems from JSON lines, plain or gzip. Raises `InvalidRequestError` that names an invalid line."""
    found = []
    for place, line in lines(path):
        try:
            record = json_object(line, place)
            found.append(Problem(str(record["problem"]), str(record["answer"])))
        except (BadLineError, KeyError):
            raise InvalidRequestError(f'{place}: want {{"problem": ..., "answer": ...}}') from None
    if not found:
        raise InvalidRequestError(f"{path} holds no problems")
    return found


async def measure_curve(
    settings: Settings,
    curve: ThresholdCurve,
    problems: Sequence[Problem],
    *,
    progress: Callable[[str], None] = lambda text: None,
    save: Callable[[ThresholdCurve], None] = lambda curve: None,
    **given: Any,
) -> None:
    """Solve the problems that `curve` still lacks at every threshold, and call `save` after each problem.

    Each problem is solved at all thresholds in turn, so that load on the machine affects all of them alike. `given` is
    passed to the `Runtime`. Raises `ConfigurationError` if the plan's model has no threshold.
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
            memo = CallMemo()
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


async def _solve(backend: DelegationBackend, problem: Problem, plan: CurvePlan, memo: CallMemo | None) -> SolvedProblem:
    sampling = SamplingParams(temperature=plan.temperature, max_tokens=plan.max_tokens)
    messages = [{"role": "user", "content": problem.problem}]
    request = GenerateRequest(plan.model, messages=messages, sampling=sampling, store=False)
    before, began, counts = memo.seconds if memo else 0.0, time.perf_counter(), None
    thinking = answer = ""
    async for delta in backend.generate(request):
        thinking += delta.extra.get("reasoning", "")
        answer += delta.text
        counts = delta.speculation or counts
    seconds = memo.seconds - before if memo else time.perf_counter() - began
    assert isinstance(counts, StepSpeculation)
    return SolvedProblem(
        correct=is_correct(f"{thinking}\n{answer}", problem.answer),
        seconds=seconds,
        steps=counts.steps,
        proposed=counts.proposed_steps,
        accepted=counts.accepted_steps,
        base_tokens=counts.kept_tokens["base"],
        small_tokens=counts.kept_tokens["small"],
        spent_tokens=sum(counts.spent_tokens.values()),
    )


def is_correct(text: str, answer: str) -> bool:
    """Whether the last boxed expression of `text`, or its last number if nothing is boxed, equals `answer`."""
    boxed = re.findall(r"boxed\{([^{}]*)\}", text)
    numbers = boxed[-1:] or _NUMBER.findall(text)[-1:]
    return bool(numbers) and _canonical(numbers[0]) == _canonical(answer)


def _canonical(text: str) -> str | float:
    plain = text.strip().strip("$").replace(",", "")
    try:
        return float(plain)
    except ValueError:
        return plain
