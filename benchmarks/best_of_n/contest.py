"""Compares drafters for best-of-N: the suffix cache, STAND's n-grams, and both together.

For each figure a drafter starts empty and passes over all questions; it keeps what it has learned from one question to
the next, as in a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType

from agentspec.benchmarks import report
from agentspec.benchmarks.best_of_n.drafters import MixedContender, StandContender, SuffixContender
from agentspec.benchmarks.best_of_n.replay import Contender, Cost, Outcome, SampledQuestion, curve, replay, speed_ratio
from agentspec.benchmarks.report import Progress
from agentspec.calibration.measure import read_problems
from agentspec.errors import InvalidRequestError

BUDGETS = (8, 16, 32)
FLAT = {1: 1.0, 2: 1.1, 32: 1.1, 33: 1.13}  # a device that computes 32 tokens in about the time of one
BASELINE = "suffix"
SIDE_BY_SIDE, IN_TURN = "side by side", "in turn"
HERE = "this machine"
MIDDLE = 16  # the budget of figures that are shown for one budget only
SIZES = (1, 8, 16, 32)
FIGURES = ("tokens_per_step", "nodes_per_step", "acceptance", "draft_microseconds", "learn_microseconds")


@dataclass(frozen=True, slots=True)
class Entrant:
    """Makes a drafter. `ranks`: the drafter needs the likeliest tokens of every verified row of logits."""

    make: Callable[[], Contender]
    ranks: bool = True


@dataclass(frozen=True, slots=True)
class Machine:
    """The cost of a forward, and of ranking its logits, by number of tokens, in forwards of one token."""

    forward: Cost
    ranking: Cost

    def cost(self, *, ranks: bool) -> Cost:
        return (lambda tokens: self.forward(tokens) + self.ranking(tokens)) if ranks else self.forward


Entrants = Mapping[str, Entrant]


@dataclass(frozen=True, slots=True)
class ContestPlan:
    """What to record: `choices` answers of at most `max_tokens` to `questions` problems, spread evenly over a file."""

    model: str
    problems: Path
    questions: int = 12
    choices: int = 8
    max_tokens: int = 160
    temperatures: Sequence[float] = (0.7, 1.0)


@dataclass(slots=True)
class Standing:
    """One drafter in one order: its outcome at each budget, and, with the governor's cuts, for each machine by name."""

    name: str
    order: str
    budgets: dict[int, Outcome] = field(default_factory=dict)
    governed: dict[str, Outcome] = field(default_factory=dict)


@dataclass(slots=True)
class Contest:
    """The results of all drafters on one set of questions at one temperature."""

    temperature: float
    questions: int
    tokens: int
    machines: Mapping[str, Machine]
    standings: list[Standing] = field(default_factory=list)

    def baseline(self, order: str) -> Standing:
        return next(one for one in self.standings if (one.name, one.order) == (BASELINE, order))


ENTRANTS: Entrants = {
    BASELINE: Entrant(SuffixContender, ranks=False),
    "suffix, unlikely nodes too": Entrant(partial(SuffixContender, 0.0), ranks=False),
    "suffix, siblings' text at once": Entrant(partial(SuffixContender, 0.0, live=True), ranks=False),
    "STAND": Entrant(StandContender),
    "suffix + STAND": Entrant(lambda: MixedContender(SuffixContender(0.0), StandContender())),
}


def run_contest(contest: Contest, questions: Sequence[SampledQuestion], running: Entrants, progress: Progress) -> None:
    """Replay the questions with every drafter in both orders, at every budget and cost."""
    for order in (SIDE_BY_SIDE, IN_TURN):
        for name, entrant in running.items():
            progress(f"temperature {contest.temperature:g}, {order}: {name}")
            standing, beside = Standing(name, order), order == SIDE_BY_SIDE
            for budget in BUDGETS:
                standing.budgets[budget] = replay(questions, entrant.make(), budget, beside=beside)
            for label, machine in contest.machines.items():
                cost = machine.cost(ranks=entrant.ranks)
                standing.governed[label] = replay(questions, entrant.make(), max(BUDGETS), beside=beside, cost=cost)
            contest.standings.append(standing)


def run_best_of_n(plan: ContestPlan, progress: Progress) -> BestOfNReport:
    """Record answers at each temperature, and replay them with every drafter."""
    from agentspec.backends.settings import TorchSettings
    from agentspec.backends.torch import TorchBackend
    from agentspec.benchmarks.best_of_n.record import AnswerRecorder, measured

    texts = spread([problem.problem for problem in read_problems(plan.problems)], plan.questions)
    progress(f"loading {plan.model}")
    backend = TorchBackend.load(TorchSettings(model=plan.model))
    machines = {HERE: Machine(*measured(backend.target)), "flat": Machine(curve(FLAT), np.zeros_like)}
    contests: list[Contest] = []
    for temperature in plan.temperatures:
        recorder = AnswerRecorder(backend, temperature, plan.max_tokens, progress)
        questions = recorder.record(texts, plan.choices)
        contests.append(Contest(temperature, len(questions), tokens_of(questions), machines))
        run_contest(contests[-1], questions, ENTRANTS, progress)
    return BestOfNReport(contests)


def tokens_of(questions: Sequence[SampledQuestion]) -> int:
    return sum(len(answer.tokens) for question in questions for answer in question.answers)


def spread(texts: Sequence[str], count: int) -> list[str]:
    """So many of the texts, spread evenly over all. Raises `InvalidRequestError` if there are too few."""
    if len(texts) < count:
        raise InvalidRequestError(f"need {count} problems, found {len(texts)}: name another file, or ask fewer")
    return [texts[index * len(texts) // count] for index in range(count)]


@dataclass(frozen=True, slots=True)
class BestOfNReport:
    contests: Sequence[Contest]

    def show(self) -> Iterator[RenderableType]:
        for contest in self.contests:
            for order in (SIDE_BY_SIDE, IN_TURN):
                yield _table(contest, order)
        for name, machine in self.contests[0].machines.items():
            for what, cost in (("a forward", machine.forward), ("ranking", machine.ranking)):
                shown = ", ".join(f"{size}: {value:.3f}" for size, value in _costs(cost).items())
                yield f"{name}: cost of {what} by its tokens, in forwards of one: {shown}"

    def data(self) -> dict[str, Any]:
        return {"contests": [_contest_data(contest) for contest in self.contests]}


def _table(contest: Contest, order: str) -> RenderableType:
    columns = ["drafter", *(f"tokens/step at {budget}" for budget in BUDGETS), "accepted"]
    columns += [*(f"speed, {name}" for name in contest.machines), "draft, learn (us)"]
    title = f"temperature {contest.temperature:g}, {order}: {contest.questions} questions, {contest.tokens} tokens"
    rows = (_cells(contest, standing) for standing in contest.standings if standing.order == order)
    return report.table(title, columns, rows)


def _cells(contest: Contest, standing: Standing) -> list[str]:
    middle, baseline = standing.budgets[MIDDLE], contest.baseline(standing.order)
    speeds = []
    for name, outcome in standing.governed.items():
        ratio, low, high = speed_ratio(outcome, baseline.governed[name])
        speeds.append(f"{outcome.speed:.2f}x, {ratio:.3f} [{low:.3f}, {high:.3f}]")
    return [
        standing.name,
        *(f"{standing.budgets[budget].tokens_per_step:.2f}" for budget in BUDGETS),
        f"{middle.acceptance:.2f}",
        *speeds,
        f"{middle.draft_microseconds:.0f}, {middle.learn_microseconds:.0f}",
    ]


def _costs(cost: Cost) -> dict[int, float]:
    return dict(zip(SIZES, cost(np.array(SIZES, dtype=np.int64)).tolist(), strict=True))


def _contest_data(contest: Contest) -> dict[str, Any]:
    return {
        "temperature": contest.temperature,
        "questions": contest.questions,
        "tokens": contest.tokens,
        "forward_costs": {name: _costs(machine.forward) for name, machine in contest.machines.items()},
        "ranking_costs": {name: _costs(machine.ranking) for name, machine in contest.machines.items()},
        "standings": [_standing_data(contest, one) for one in contest.standings],
    }


def _standing_data(contest: Contest, one: Standing) -> dict[str, Any]:
    baseline = contest.baseline(one.order)
    return {
        "name": one.name,
        "order": one.order,
        "budgets": {
            budget: {name: getattr(outcome, name) for name in FIGURES} for budget, outcome in one.budgets.items()
        },
        "governed": {
            name: {
                "speed": outcome.speed,
                "nodes_per_step": outcome.nodes_per_step,
                "ratio": speed_ratio(outcome, baseline.governed[name]),
            }
            for name, outcome in one.governed.items()
        },
    }
