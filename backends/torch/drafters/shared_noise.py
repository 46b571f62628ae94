"""Draws from another model's logits as the target's sampler will draw from its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentspec.backends.torch.sampling.sampler import GREEDY_BELOW, gumbel_noise, position_key
from agentspec.types import SamplingParams

HEAD = 64  # candidates considered: less likely tokens are hardly ever drawn by two models at once


@dataclass(frozen=True, slots=True)
class SharedNoiseSampler:
    """Gumbel-max with the noise of the request that is drafted for, so that a close model draws the same tokens.

    It works on the `HEAD` most likely tokens and leaves out penalties: what it gets wrong costs acceptance only.
    """

    sampling: SamplingParams
    seed: int
    choice: int = 0

    def rank(self, logits: Tensor, position: int, count: int) -> tuple[list[int], list[float]]:
        """The `count` best tokens for absolute `position` from `logits` [vocab], best first, each with its chance.

        With scores z = logits + T * noise the draw is the argmax of z, and its chance to be the target's too is taken
        as softmax(z): without noise the model's own probability, with noise the larger the further ahead it is.
        """
        scores, ids = self._candidates(logits)
        if self.sampling.temperature >= GREEDY_BELOW:
            key = position_key(self.seed, self.choice, position)
            scores = scores + self.sampling.temperature * gumbel_noise(key, ids)
        best = scores.softmax(0).topk(min(count, len(ids)))
        tokens: list[int] = ids[best.indices].tolist()
        return tokens, best.values.tolist()

    def _candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest tokens that survive top_k, min_p and top_p, with their logits in descending order."""
        sampling = self.sampling
        if legal := {token: bias for token, bias in sampling.logit_bias.items() if token < len(logits)}:
            logits = logits.index_add(0, *_pair(legal, logits))
        scores, ids = logits.topk(min(HEAD, sampling.top_k or HEAD, len(logits)))
        if sampling.temperature < GREEDY_BELOW:
            return scores, ids
        chances = (scores / sampling.temperature - (logits / sampling.temperature).logsumexp(0)).exp()
        keep = (chances >= sampling.min_p * chances[0]) & (chances.cumsum(0) - chances < sampling.top_p)
        keep[0] = True
        return scores[keep], ids[keep]


def _pair(bias: dict[int, float], like: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tensor(list(bias), device=like.device), torch.tensor(list(bias.values()), device=like.device)
