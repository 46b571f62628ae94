"""Lossy rules, by which drafted tokens are accepted in place of the model's own draws."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from agentspec.backends.torch.sampling.sampler import Sampler
from agentspec.protocol.speculation import LossyAcceptanceSpeculation
from agentspec.types import LossyAcceptance, Source, Speculation


def typical_bound(probabilities: Tensor, epsilon: float, delta: float) -> float:
    """The least probability of a typical token: min(epsilon, delta * exp(-entropy)), of a distribution [vocab]
    (Medusa, Cai et al. 2024, section 2.3.2).
    """
    entropy = -float(torch.special.xlogy(probabilities, probabilities).sum())
    return min(epsilon, delta * math.exp(-entropy))


class Substitutes:
    """One answer's lossy rule: accepts typical tokens of the draft model in place of the target's own draws, and counts
    them. Tokens that the request forbids are never accepted. `taken` are the nodes of the running step.
    """

    def __init__(self, rule: LossyAcceptance, sampler: Sampler) -> None:
        self.taken: list[int] = []
        self._rule, self._sampler = rule, sampler
        self._count = 0
        self._tokens: Sequence[int] = ()
        self._sources: Sequence[int] = ()

    @classmethod
    def of(cls, rule: LossyAcceptance, sampler: Sampler) -> Substitutes | None:
        """None for an exact answer: greedy ones have no other typical token, and forms promise each token."""
        formed = sampler.constraints is not None and sampler.constraints.grammar is not None
        return None if formed or sampler.greedy else cls(rule, sampler)

    def begin(self, tokens: Sequence[int], sources: Sequence[int]) -> None:
        """Take a step's draft."""
        self.taken, self._tokens, self._sources = [], tokens, sources

    def choose(self, row: int, nodes: Sequence[int]) -> int | None:
        """One of the draft's `nodes`, all of which follow `row`, to go on with; None for the target's own draw."""
        drafted = (node for node in nodes if self._sources[node] == Source.MODEL)
        ours = [node for node in drafted if self._sampler.may_draw(self._tokens[node])]
        if not ours:
            return None
        probabilities = self._sampler.probabilities(row)
        best = max(ours, key=lambda node: float(probabilities[self._tokens[node]]))
        bound = typical_bound(probabilities, self._rule.epsilon, self._rule.delta)
        if float(probabilities[self._tokens[best]]) <= bound:
            return None
        self.taken.append(best)
        self._count += 1
        return best

    def labelled(self, done: Speculation) -> LossyAcceptanceSpeculation:
        """What is reported of the answer."""
        return LossyAcceptanceSpeculation(
            done.drafted,
            done.accepted,
            done.steps,
            done.estimated_seconds_saved,
            knobs=self._rule.knobs,
            substituted=self._count,
        )
