"""Measures a strategy that delegates thinking: problems are answered by the base model, the small one, and both."""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from agentspec.benchmarks.reasoning.grading import final_answer, is_right
from agentspec.errors import AgentSpecError, ConfigurationError
from agentspec.protocol.speculation import StepSpeculation
from agentspec.reasoning.settings import DelegationSettings, SpecReasonSettings
from agentspec.types import Delta, GenerateRequest

LETTERS = "ABCDEFGHIJ"
BASE, SMALL = "base alone", "small alone"
PROMPTS = {  # {problem} includes the choices
    # As DeepSeek-R1's authors advise, and the programs of Speculative Thinking and Lookahead ask.
    "boxed": "{problem}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
    # As SpecReason's program asks, the second for choices: https://github.com/ruipeterpan/specreason
    "newlines": (
        "Solve the following math problem efficiently and clearly. Please reason step by step, separate logical"
        " reasoning steps with two newline characters (\n\n), and put your final answer within \\boxed{{}}.\n"
        "Problem: {problem}"
    ),
    "gpqa": (
        "What is the correct answer to the following problem? Please reason step by step. Separate logical reasoning"
        " steps with two newline characters (\n\n).\nPut the final answer **strictly** in the format \\boxed{{X}},"
        " where X is a single letter (A, B, C, or D).\n\n**Example output:** \\boxed{{A}}\n\nProblem: {problem}"
    ),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem and its final answer; with `choices` the answer is a letter."""

    text: str
    answer: str
    choices: tuple[str, ...] = ()

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Problem:
        """A record of AIME, AMC, GSM8K, MATH or GPQA as they are published, with any capitals.

        Raises `ValueError` for a record without a problem or its answer.
        """
        fields = {name.lower(): value for name, value in record.items()}
        text = next((fields[name] for name in ("problem", "question", "prompt") if fields.get(name)), None)
        if not isinstance(text, str):
            raise ValueError('no "problem" or "question" in it')
        if "correct answer" in fields:  # GPQA, whose right answer comes first
            given = [fields["correct answer"], *(fields.get(f"incorrect answer {n}") for n in (1, 2, 3))]
            choices = [str(choice).strip() for choice in given if choice is not None]
            right = choices[0]
            random.Random(hashlib.sha256(text.encode()).digest()).shuffle(choices)
            return cls(text, LETTERS[choices.index(right)], tuple(choices))
        choices = _choices(fields.get("choices") or fields.get("options"))
        named = (fields.get(name) for name in ("correct", "answer", "final_answer"))
        answer = next((one for one in named if one is not None), None)
        if choices:
            return cls(text, _letter(answer, choices), tuple(choices))
        if answer is None or "####" in str(answer):  # MATH boxes it in the solution, GSM8K names it at the end
            answer = final_answer(str(fields.get("solution", "") if answer is None else answer))
        if answer is None or not str(answer).strip():
            raise ValueError('no "answer" in it, and no solution that boxes one')
        return cls(text, str(answer))

    def prompt(self, preset: str | None = None) -> str:
        """The question in the words of a preset; without one in SpecReason's."""
        preset = preset or ("gpqa" if self.choices else "newlines")
        lines = [f"({letter}) {choice}" for letter, choice in zip(LETTERS, self.choices, strict=False)]
        asked = ["The answer is the letter of a choice."] if preset == "boxed" else []
        text = "\n".join([f"{self.text}\nChoices:", *lines, *asked]) if self.choices else self.text
        return PROMPTS[preset].format(problem=text)


def _choices(given: Any) -> list[str]:
    """The choices, of a list or of an object by letter."""
    listed = [given[letter] for letter in sorted(given)] if isinstance(given, Mapping) else given or ()
    return [str(choice) for choice in listed]


def _letter(answer: Any, choices: Sequence[str]) -> str:
    """The letter of the right choice, which is named by its index from 0 on, its letter or its text."""
    if isinstance(answer, int) and 0 <= answer < len(choices):
        return LETTERS[answer]
    if str(answer) in choices:
        return LETTERS[choices.index(str(answer))]
    if str(answer).strip("() ") in LETTERS[: len(choices)]:
        return str(answer).strip("() ")
    raise ValueError(f"the answer {answer!r} is none of the choices")


Arms = dict[str, DelegationSettings]
"""Ways to answer: the settings of a strategy's model, some of them such that its base model thinks alone."""


def arms_of(name: str, settings: DelegationSettings, thresholds: Sequence[float] = ()) -> Arms:
    """Base and small model alone, and the strategy, or SpecReason at each of `thresholds`.

    Raises `ConfigurationError` for thresholds of a strategy that has none, and below 0.
    """
    bases = {BASE: settings.base, SMALL: settings.small}
    found = {arm: settings.model_copy(update={"base": base}).think_alone() for arm, base in bases.items()}
    if not thresholds:
        return {**found, name: settings}
    if not isinstance(settings, SpecReasonSettings) or min(thresholds) < 0:
        raise ConfigurationError(
            f"models.{name} has no such thresholds: they are numbers from 0 on, and those of specreason alone"
        )
    swept = {one: settings.model_copy(update={"threshold": one}) for one in thresholds}
    return found | {f"{name}, threshold {one:g}": changed for one, changed in swept.items()}


@dataclass(frozen=True, slots=True)
class GradedAnswer:
    """One answer. `thinking` counts its tokens of thinking, `delegated` those that the small model wrote."""

    arm: str
    problem: int
    sample: int
    right: bool = False
    tokens: int = 0
    seconds: float = 0.0
    thinking: int = 0
    delegated: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """The means of an arm's answers; `low` and `high` bound the accuracy by Wilson's 95 % interval over problems."""

    arm: str
    answers: int
    failed: int
    accuracy: float
    low: float
    high: float
    tokens: float
    seconds: float
    delegated: float

    @classmethod
    def of(cls, arm: str, answers: Sequence[GradedAnswer]) -> Summary:
        given = [one for one in answers if one.arm == arm]
        done, n = [one for one in given if one.error is None], max(1, len({one.problem for one in given}))
        right = sum(one.right for one in given) / max(1, len(given))
        center, spread = right + 1.92 / n, 1.96 * math.sqrt(right * (1 - right) / n + 0.9604 / n**2)
        low, high = ((center + sign * spread) / (1 + 3.84 / n) for sign in (-1, 1))
        return cls(
            arm,
            answers=len(given),
            failed=len(given) - len(done),
            accuracy=right,
            low=max(0.0, low),
            high=min(1.0, high),
            tokens=sum(one.tokens for one in done) / max(1, len(done)),
            seconds=sum(one.seconds for one in done) / max(1, len(done)),
            delegated=sum(one.delegated for one in done) / max(1, sum(one.thinking for one in done)),
        )


async def evaluate(
    requests: Mapping[str, GenerateRequest],
    generate: Callable[[GenerateRequest], AsyncGenerator[Delta]],
    problems: Sequence[Problem],
    *,
    prompt: str | None,
    samples: int,
    at_once: int,
    answered: Callable[[GradedAnswer], None],
) -> None:
    """Ask every problem `samples` times of each arm in turn, `at_once` at the same time, and hand on each answer.

    `requests` holds what each arm is asked, but for its messages and seed. Cancelling it cancels the models' work.
    """

    def questions() -> Iterator[tuple[str, int, int]]:
        return ((arm, index, n) for n in range(samples) for index in range(len(problems)) for arm in requests)

    async def work() -> None:
        for arm, index, n in waiting:
            problem, asked = problems[index], requests[arm]
            messages = [{"role": "user", "content": problem.prompt(prompt)}]
            request = replace(asked, messages=messages, sampling=replace(asked.sampling, seed=n))
            answered(await _graded(generate(request), problem, GradedAnswer(arm, index, n)))

    waiting = questions()
    async with asyncio.TaskGroup() as workers:
        for _ in range(at_once):
            workers.create_task(work())


async def _graded(deltas: AsyncGenerator[Delta], problem: Problem, asked: GradedAnswer) -> GradedAnswer:
    began, text, last = time.perf_counter(), "", Delta()
    at = (asked.arm, asked.problem, asked.sample)
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                text, last = text + delta.text, delta
    except AgentSpecError as error:
        return GradedAnswer(*at, error=error.message)
    tokens = 0 if last.usage is None else last.usage.completion_tokens
    kept = last.speculation.kept_tokens if isinstance(last.speculation, StepSpeculation) else {}
    seconds, thinking, delegated = time.perf_counter() - began, sum(kept.values()), kept.get("small", 0)
    return GradedAnswer(*at, is_right(text, problem.answer), tokens, seconds, thinking, delegated)
