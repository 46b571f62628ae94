"""Teacher-forced replay of several recorded answers to each question, with one drafter after another.

The answers of a question are decoded side by side, with one verification each in every round, or one after another.
The noise of a draw depends on its position, so that a drafted token is accepted exactly if it equals the recorded
token: the replayed steps are exact. Drafters learn from the recorded distributions of the drawn tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.tokens import Tokens
from agentspec.recordings.replay import accepted_nodes
from agentspec.speculation.governor import Governor, allocate_budget, best_nodes
from agentspec.types import Draft

Floats = NDArray[np.float64]
Cost = Callable[[NDArray[np.int64]], Floats]
"""The cost of a forward by its number of tokens, in forwards of one token."""


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The likeliest tokens [rows, top] of the model's distributions, best first, and their raw log-probabilities."""

    ids: Tokens
    logprobs: NDArray[np.float32]

    def __getitem__(self, part: slice) -> TopTokens:
        return TopTokens(self.ids[part], self.logprobs[part])

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """The drawn tokens, and for each the distribution that it was drawn from."""

    tokens: Tokens
    rows: TopTokens


@dataclass(frozen=True, slots=True)
class SampledQuestion:
    """A prompt with its recorded answers, drawn at one temperature with the noise of one seed."""

    prompt: Tokens
    answers: Sequence[SampledAnswer]
    temperature: float
    seed: int
    prompt_rows: TopTokens


class Contender(Protocol):
    """A drafter for the answers to one question at a time. It may keep what it learns for later questions."""

    def open(self, question: SampledQuestion) -> None: ...

    def draft(self, choice: int, budget: int) -> Draft:
        """Draft tokens that may follow the committed part of answer `choice`."""
        ...

    def commit(self, choice: int, start: int, end: int) -> None:
        """Learn that tokens `start` to `end` of answer `choice` are verified, with the model's rows for them."""
        ...

    def close(self, choice: int) -> None:
        """Learn that answer `choice` is complete."""
        ...


@dataclass(slots=True)
class VerifySteps:
    """The verification steps of one question: the verified nodes and the emitted tokens of each step."""

    nodes: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(self.emitted)

    @property
    def accepted(self) -> int:
        return self.tokens - len(self.emitted)

    def cost(self, cost: Cost) -> float:
        return float(cost(1 + np.asarray(self.nodes, dtype=np.int64)).sum())


@dataclass(slots=True)
class Outcome:
    """One pass over all questions. `cost` is the cost of forwards."""

    cost: Cost | None = None
    questions: list[VerifySteps] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return sum(len(one.nodes) for one in self.questions)

    @property
    def tokens_per_step(self) -> float:
        return sum(one.tokens for one in self.questions) / self.steps

    @property
    def nodes_per_step(self) -> float:
        return sum(sum(one.nodes) for one in self.questions) / self.steps

    @property
    def acceptance(self) -> float:
        """Share of the drafted nodes that were accepted."""
        return sum(one.accepted for one in self.questions) / max(1, sum(sum(one.nodes) for one in self.questions))

    @property
    def forwards(self) -> Floats:
        """The cost of the steps of each question, in forwards of one token."""
        assert self.cost is not None, "replayed without a cost"
        return np.array([one.cost(self.cost) for one in self.questions])

    @property
    def speed(self) -> float:
        """Speed relative to decoding without drafts, if drafting took no time."""
        return sum(one.tokens for one in self.questions) / float(self.forwards.sum())


def replay(
    questions: Iterable[SampledQuestion],
    contender: Contender,
    budget: int,
    *,
    beside: bool = True,
    cost: Cost | None = None,
) -> Outcome:
    """Decode every question's answers `beside` each other or one after another, with trees of at most `budget` nodes.

    With `cost` the governor cuts each tree to the nodes that pay off at that cost, as in the engine.
    """
    outcome, governor = Outcome(cost), Governor()
    for question in questions:
        contender.open(question)
        steps = VerifySteps()
        choices = range(len(question.answers))
        for group in [list(choices)] if beside else [[choice] for choice in choices]:
            _decode(question, group, contender, budget, DraftCutter(governor, budget, cost), steps)
        outcome.questions.append(steps)
    return outcome


@dataclass(slots=True)
class DraftCutter:
    """Cuts drafts with the engine's governor, if there is a cost, and reports accepted tokens to the governor."""

    governor: Governor
    budget: int
    cost: Cost | None

    def cut(self, draft: Draft) -> Draft:
        cost = self.cost
        if not len(draft) or (cost is None and len(draft) <= self.budget):
            return draft
        worth = self._worth(draft)
        count = (
            min(self.budget, len(draft))
            if cost is None
            else allocate_budget([worth], 1, lambda nodes: cost(1 + nodes))[0]
        )
        return part_of(draft, best_nodes(worth, min(count, self.budget)))

    def _worth(self, draft: Draft) -> list[float]:
        columns = draft.probabilities.tolist(), draft.parents.tolist(), draft.source.tolist()
        return self.governor.expectations(*columns)

    def learn(self, draft: Draft, accepted: NDArray[np.bool_]) -> None:
        self.governor.observe(draft.probabilities.tolist(), draft.source.tolist(), accepted.tolist())


def part_of(draft: Draft, nodes: Sequence[int]) -> Draft:
    """The tree made of `nodes`, ascending and closed under parents."""
    kept = np.asarray(nodes, dtype=np.int64)
    place = np.full(len(draft) + 1, -1, dtype=np.int32)  # the last entry stands for the parent -1
    place[kept] = np.arange(len(kept))
    return Draft(
        tokens=draft.tokens[kept],
        parents=place[draft.parents[kept]],
        probabilities=draft.probabilities[kept],
        match_length=draft.match_length[kept],
        source=draft.source[kept],
    )


def _decode(
    question: SampledQuestion,
    group: Sequence[int],
    contender: Contender,
    budget: int,
    cutter: DraftCutter,
    steps: VerifySteps,
) -> None:
    """Decode the answers in `group` in rounds: first all answers draft, then all commit their verified tokens."""
    at = dict.fromkeys(group, 0)
    while at:
        drafts = {choice: contender.draft(choice, budget) for choice in at}
        for choice, whole in drafts.items():
            draft, actual = cutter.cut(whole), question.answers[choice].tokens[at[choice] :]
            accepted = accepted_nodes(draft, actual)
            cutter.learn(draft, accepted)
            emitted = min(int(accepted.sum()) + 1, len(actual))
            contender.commit(choice, at[choice], at[choice] + emitted)
            steps.nodes.append(len(draft))
            steps.emitted.append(emitted)
            at[choice] += emitted
        for choice in [choice for choice, end in at.items() if end == len(question.answers[choice].tokens)]:
            contender.close(choice)
            del at[choice]


def curve(points: dict[int, float]) -> Cost:
    """A cost that is linear between measured sizes (tokens: seconds), and extrapolated beyond the last size."""
    sizes, seconds = np.array(sorted(points), dtype=np.float64), np.array([points[size] for size in sorted(points)])
    rise = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])

    def cost(tokens: NDArray[np.int64]) -> Floats:
        beyond = np.maximum(tokens - sizes[-1], 0) * rise
        return np.asarray((np.interp(tokens, sizes, seconds) + beyond) / seconds[0])

    return cost
