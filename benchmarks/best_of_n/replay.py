"""Records several sampled answers to each question, and replays them with one drafter after another, teacher-forced.

The answers of a question are decoded side by side, with one verification each in every round, or one after another.
The noise of a draw depends on its position, so that a drafted token is accepted exactly if it equals the recorded
token: the replayed steps are exact. Drafters learn from the recorded distributions of the drawn tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentspec.backends.torch.model.batch import BatchItem
from agentspec.backends.torch.model.kv_cache import RowsPart, SequenceCache
from agentspec.backends.torch.sampling.sampler import Sampler
from agentspec.backends.torch.text.model_text import ids_of_end
from agentspec.benchmarks.report import Progress
from agentspec.cache.tokens import Tokens
from agentspec.recordings.replay import accepted_nodes
from agentspec.speculation.governor import Governor, allocate_budget, best_nodes
from agentspec.types import Draft, SamplingParams

if TYPE_CHECKING:
    from agentspec.backends.torch import TorchBackend
    from agentspec.backends.torch.model.target import TargetModel

TOP = 16  # tokens of each distribution that are kept
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


@dataclass(slots=True)
class AnswerInProgress:
    """An unfinished answer. Its next token will be drawn from `logits` [vocab]."""

    rows: SequenceCache
    sampler: Sampler
    logits: Tensor
    tokens: list[int] = field(default_factory=list)
    seen: list[TopTokens] = field(default_factory=list)

    def draw(self) -> int:
        self.seen.append(likeliest(self.logits[None]))
        self.sampler.begin(self.logits[None])
        token = self.sampler.choose(0)
        self.sampler.observe(token)
        self.tokens.append(token)
        return token

    @property
    def answer(self) -> SampledAnswer:
        ids = np.concatenate([row.ids for row in self.seen])
        logprobs = np.concatenate([row.logprobs for row in self.seen])
        return SampledAnswer(np.array(self.tokens, dtype=np.int32), TopTokens(ids, logprobs))


@dataclass(frozen=True, slots=True)
class AnswerRecorder:
    """Records a backend's answers at one temperature; every question has its own seed."""

    backend: TorchBackend
    temperature: float
    max_tokens: int
    progress: Progress

    def record(self, questions: Sequence[str], choices: int) -> list[SampledQuestion]:
        return [self._answered(index, text, choices) for index, text in enumerate(questions)]

    def _answered(self, index: int, text: str, choices: int) -> SampledQuestion:
        self.progress(f"temperature {self.temperature:g}: {choices} answers to question {index + 1}")
        prompt = self.backend.encode_chat([{"role": "user", "content": text}])
        ends = ids_of_end(self.backend.target.module.generation_config, self.backend.tokenizer)
        sampling = SamplingParams(temperature=self.temperature, seed=index, max_tokens=self.max_tokens)
        return record(self.backend.target, prompt, sampling, ends, choices)


@torch.inference_mode()
def record(
    target: TargetModel,
    prompt: Sequence[int],
    sampling: SamplingParams,
    ends: frozenset[int],
    choices: int,
) -> SampledQuestion:
    """Record `choices` answers to `prompt`, one forward per token, drawn as the engine draws them with this seed."""
    assert sampling.seed is not None and sampling.max_tokens is not None, "a replay draws with the same noise again"
    length = sampling.max_tokens
    rows = target.new_cache(len(prompt) + length)
    logits = target.forward(rows, prompt[:1], prompt[1:], range(-1, len(prompt) - 2))
    rows.commit(1, range(len(prompt) - 1))
    answers = [_begun(target, prompt, sampling, choice, rows, logits[-1]) for choice in range(choices)]
    running = answers
    while running := [one for one in running if one.draw() not in ends and len(one.tokens) < length]:
        fresh = target.forward_batch([BatchItem(one.rows, one.tokens[-1:]) for one in running])
        for one, row in zip(running, fresh, strict=True):
            one.rows.commit(1, ())
            one.logits = row[0]
    tokens = np.array(prompt, dtype=np.int32)
    return SampledQuestion(
        tokens, [one.answer for one in answers], sampling.temperature, sampling.seed, likeliest(logits)
    )


def _begun(
    target: TargetModel,
    prompt: Sequence[int],
    sampling: SamplingParams,
    choice: int,
    rows: SequenceCache,
    logits: Tensor,
) -> AnswerInProgress:
    sampler = Sampler(sampling, target.vocab_size, prompt, target.device, choice=choice)
    copied = SequenceCache.joined([RowsPart(rows.rows(0, rows.length), rows.length, release=True)], rows.capacity)
    return AnswerInProgress(copied, sampler, logits)


def likeliest(logits: Tensor) -> TopTokens:
    """The `TOP` likeliest tokens of logits [rows, vocab]."""
    best = logits.log_softmax(-1).topk(TOP)
    return TopTokens(best.indices.cpu().numpy().astype(np.int32), best.values.cpu().numpy())
