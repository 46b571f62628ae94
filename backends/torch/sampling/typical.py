"""Typical acceptance: a lossy rule that accepts drafted tokens which the target finds likely enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def typical_bound(probabilities: Tensor, epsilon: float, delta: float) -> float:
    """The least probability of a typical token: min(epsilon, delta * exp(-entropy)), of a distribution [vocab]
    (Medusa, Cai et al. 2024, section 2.3.2).
    """
    entropy = -float(torch.special.xlogy(probabilities, probabilities).sum())
    return min(epsilon, delta * math.exp(-entropy))


class TypicalAcceptance:
    """Accepts the likeliest drafted token that is typical of the target's processed distribution after a row.

    At temperature 0 this distribution has a single token, so that nothing but the target's own draw is accepted.
    """

    def __init__(
        self, tokens: Sequence[int], probabilities: Callable[[int], Tensor], *, epsilon: float, delta: float
    ) -> None:
        self._tokens = tokens
        self._probabilities = probabilities
        self._epsilon, self._delta = epsilon, delta

    def choose(self, row: int, nodes: Sequence[int]) -> int | None:
        probabilities = self._probabilities(row)
        best = max(nodes, key=lambda node: float(probabilities[self._tokens[node]]))
        bound = typical_bound(probabilities, self._epsilon, self._delta)
        return best if float(probabilities[self._tokens[best]]) > bound else None
