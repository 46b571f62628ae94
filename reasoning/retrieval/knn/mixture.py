"""KNN-LM's distribution: the model's own, mixed with the neighbours' (Khandelwal et al. 2020, section 2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentspec.backends.base import Floats
from agentspec.reasoning.retrieval.knn.search import Neighbours

SLACK = 1e-4  # of probability: far more than rounding to float32 moves

Prior = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Mixture:
    """p(y) = weight * p_knn(y) + (1 - weight) * p_lm(y), where p_knn shares by exp(-distance / temperature)."""

    weight: float
    temperature: float

    def prior(self, logits: Floats) -> Prior:
        """log((1 - weight) * p_lm) [vocab]: the model's share alone."""
        shifted = logits.astype(np.float64)
        shifted -= shifted.max()
        shifted += np.log1p(-self.weight) - np.log(np.exp(shifted).sum())
        return shifted

    def scores(self, prior: Prior, neighbours: Neighbours) -> Floats:
        """log p [vocab], to be drawn from as if they were logits."""
        tokens, shares = self._shares(neighbours)
        mixed = prior.copy()
        mixed[tokens] = np.logaddexp(mixed[tokens], np.log(self.weight) + np.log(shares))
        return mixed.astype(np.float32)

    def decided(self, prior: Prior) -> int | None:
        """The likeliest token, where no neighbours can change that: they add `weight` to another at most."""
        best = int(prior.argmax())
        if np.exp(prior[best]) <= self.weight:
            return None
        second = max(prior[:best].max(initial=-np.inf), prior[best + 1 :].max(initial=-np.inf))
        return best if np.exp(prior[best]) > np.exp(second) + self.weight + SLACK else None

    def _shares(self, neighbours: Neighbours) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """The neighbours' tokens, each once, and the probability of each, summed from the nearest on."""
        distances = neighbours.distances
        weights = np.exp((distances[0] - distances) / self.temperature)
        tokens, places = np.unique(neighbours.tokens, return_inverse=True)
        sums = np.bincount(places, weights / weights.sum())
        return tokens, np.maximum(sums, np.finfo(np.float64).tiny)
