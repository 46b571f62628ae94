"""Drafts from a small model of the same vocabulary, where that gains tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from agentspec.backends.torch.drafters.base import Drafter, path_draft
from agentspec.backends.torch.drafters.combined import merge
from agentspec.backends.torch.model.batch import BatchItem
from agentspec.backends.torch.model.device import synchronize
from agentspec.backends.torch.model.target import TargetModel
from agentspec.backends.torch.sampling.distribution import gumbel_noise, position_key
from agentspec.types import Draft, SamplingParams, Source, path_length

HEAD = 64  # candidates considered: two models hardly ever draw the same less likely token


@dataclass(frozen=True, slots=True)
class SharedNoiseSampler:
    """Gumbel-max sampling with the noise of the target's request, so that a similar draft model draws the same tokens.

    It considers only the `HEAD` most likely tokens and ignores penalties: a wrong draw only lowers the acceptance.
    """

    sampling: SamplingParams
    seed: int
    choice: int = 0

    def draw(self, logits: Tensor, position: int) -> tuple[int, float]:
        """The token for absolute `position` from `logits` [vocab], and its chance to be the target's draw too.

        With scores z = logits + T * noise the draw is the argmax of z. softmax(z) estimates its chance: without noise
        this is the model's own probability, with noise it grows with its lead in z.
        """
        scores, ids = self._candidates(logits)
        if not self.sampling.greedy:
            key = position_key(self.seed, self.choice, position)
            scores = scores + self.sampling.temperature * gumbel_noise(key, ids)
        chance, best = scores.softmax(0).max(0)
        return int(ids[best]), float(chance)

    def _candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The logits and ids of the likeliest tokens that pass top_k, min_p and top_p, in descending order."""
        sampling = self.sampling
        if legal := {token: bias for token, bias in sampling.logit_bias.items() if token < len(logits)}:
            ids = torch.tensor(list(legal), device=logits.device)
            logits = logits.index_add(0, ids, torch.tensor(list(legal.values()), device=logits.device))
        scores, ids = logits.topk(min(HEAD, sampling.top_k or HEAD, len(logits)))
        if sampling.greedy:
            return scores, ids
        chances = (scores / sampling.temperature - (logits / sampling.temperature).logsumexp(0)).exp()
        keep = (chances >= sampling.min_p * chances[0]) & (chances.cumsum(0) - chances < sampling.top_p)
        keep[0] = True
        return scores[keep], ids[keep]


CHUNK = 256  # tokens read per call until the model has caught up, so that a long prompt does not stall other answers
BEHIND = 32  # with at most so many unread tokens, the model reads them and drafts in the same call

Least = Callable[[float, int], float]
TokenSeconds = Callable[[int], float]


class ModelDrafter(Drafter):
    """Drafts a path of the model's own draws, one forward per token.

    It keeps KV slots of its own for one answer and, at each call, rewinds those of tokens that the target did not
    accept. The path ends where its probability falls below `least(seconds, context)`, the probability that makes one
    more forward of `seconds` worth its time.
    """

    def __init__(self, model: TargetModel, sampler: SharedNoiseSampler, least: Least) -> None:
        self._model, self._sampler, self._least = model, sampler, least
        self._cache = model.new_cache(1)
        self._known: list[int] = []  # the tokens of the KV slots
        self._settled = 0

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        if budget <= 0 or len(context) + budget > self._model.context_length:
            return None
        self._follow(context)
        self._cache.reserve(len(context) + budget)
        waiting = list(context[self._cache.length :])
        if max(waiting) >= self._model.vocab_size:  # same tokenizer, but fewer embeddings
            return None
        if len(waiting) > BEHIND:
            self._model.prefill(self._cache, waiting[:CHUNK])
            synchronize(self._model.device)  # so that the time counts as drafting and not as part of the next step
            self._known += waiting[:CHUNK]
            return None
        return self._drawn(waiting, len(context), budget)

    def close(self) -> None:
        self._cache, self._known, self._settled = self._model.new_cache(1), [], 0

    def _follow(self, context: Sequence[int]) -> None:
        """Keep the slots of the longest known prefix of `context`, without its last token, and drop the others."""
        start = self._settled if self._known[: self._settled] == list(context[: self._settled]) else 0
        end = min(len(self._known), len(context) - 1)
        kept = next((at for at in range(min(start, end), end) if self._known[at] != context[at]), end)
        self._cache.truncate(kept)
        del self._known[kept:]
        self._settled = kept

    def _drawn(self, waiting: list[int], position: int, budget: int) -> Draft:
        tokens, chances = list[int](), [1.0]
        while True:
            started = perf_counter()
            (logits,) = self._model.forward_batch([BatchItem(self._cache, waiting)])
            token, chance = self._sampler.draw(logits[0], position)
            tokens.append(token)
            chances.append(chances[-1] * chance)
            self._cache.commit(len(waiting), ())
            self._known += waiting
            position += 1
            if len(tokens) == budget or chances[-1] < self._least(perf_counter() - started, position):
                return path_draft(tokens, chances[1:], Source.MODEL)
            waiting = [token]


START_GAIN = 2.0  # tokens that an untried model is assumed to gain
RATE = 0.15
LONGEST_WAIT = 64  # most rounds between two trials of a model that does not pay
EXPECTED = (0.5, 2.0, 6.0)  # tokens that the cheap drafters expect: what a model gains is learned apart between any two


@dataclass(slots=True)
class Gate:
    """Whether to ask a costly drafter. While its recent `gain` is negative, it is tried ever more rarely."""

    gain: float = START_GAIN
    wait: int = 0
    waited: int = 0

    def due(self) -> bool:
        self.waited += 1
        return self.waited > self.wait

    def learn(self, gained: float) -> None:
        self.gain += RATE * (gained - self.gain)
        self.waited = 0
        self.wait = min(max(1, 2 * self.wait), LONGEST_WAIT) if self.gain < 0 and gained < 0 else 0


@dataclass(frozen=True, slots=True)
class Trial:
    """The drafts of one round without and with the costly drafter, and what that cost, in tokens."""

    gate: Gate
    length: int  # of the context
    offered: Draft | None
    merged: Draft
    cost: float


class GatedDrafter(Drafter):
    """Asks `costly` too, where that gains tokens, and merges its tree with that of the cheap drafters.

    The gain of a round is the number of accepted tokens of the merged tree less those of the cheap drafters' own, and
    less the tokens that the target would have generated in the time drafting took (`token_seconds(context)` each). Like
    SuffixDecoding's hybrid (Oliaro et al. 2025) it decides by what the cheap drafters expect, but what follows from
    that is learned.
    """

    def __init__(self, cheap: Drafter, costly: Drafter, token_seconds: Callable[[int], float]) -> None:
        self._cheap, self._costly, self._token_seconds = cheap, costly, token_seconds
        self._gates = [Gate() for _ in range(len(EXPECTED) + 1)]
        self._trial: Trial | None = None

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        self.seconds_weighed = 0.0
        self._learn(context)
        offered = self._cheap.propose(context, budget)
        gate = self._gates[bisect_right(EXPECTED, 0.0 if offered is None else float(offered.probabilities.sum()))]
        if not gate.due():
            return offered
        started = perf_counter()
        drafted = self._costly.propose(context, budget)
        self.seconds_weighed = perf_counter() - started
        merged = merge((offered, drafted))
        if merged is not None and drafted is not None:  # None: the model still reads the prompt, which occurs only once
            cost = self.seconds_weighed / self._token_seconds(len(context))
            self._trial = Trial(gate, len(context), offered, merged, cost)
        return merged

    def close(self) -> None:
        self._costly.close()

    def _learn(self, context: Sequence[int]) -> None:
        """Update the gate by how many more tokens of the last trial's draft were accepted."""
        if self._trial is None:
            return
        trial, self._trial = self._trial, None
        output = context[trial.length :]
        trial.gate.learn(_accepted(trial.merged, output) - _accepted(trial.offered, output) - trial.cost)


def _accepted(draft: Draft | None, output: Sequence[int]) -> int:
    return 0 if draft is None else path_length(draft.tokens.tolist(), draft.parents.tolist(), output)


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model, which has the target's vocabulary."""

    name: str
    model: TargetModel

    def gated(self, cheap: Drafter, noise: SharedNoiseSampler, token_seconds: TokenSeconds) -> GatedDrafter:
        """The drafter of one answer that asks this model and `cheap` where that pays. It draws with the answer's
        `noise`.
        """

        def least(seconds: float, context: int) -> float:
            return seconds / token_seconds(context)

        return GatedDrafter(cheap, ModelDrafter(self.model, noise, least), token_seconds)
