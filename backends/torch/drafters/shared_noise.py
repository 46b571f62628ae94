"""Draws tokens from a draft model's logits with the same noise as the target's sampler will use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentspec.backends.torch.sampling.sampler import gumbel_noise, position_key
from agentspec.types import SamplingParams

HEAD = 64  # candidates considered: two models hardly ever draw the same less likely token


@dataclass(frozen=True, slots=True)
class SharedNoiseSampler:
    """Gumbel-max sampling with the noise of the target's request, so that a similar draft model draws the same tokens.

    It considers only the `HEAD` most likely tokens and ignores penalties: a wrong draw only lowers the acceptance.
    """

    sampling: SamplingParams
    seed: int
    choice: int = 0

    def rank(self, logits: Tensor, position: int, count: int) -> tuple[list[int], list[float]]:
        """The `count` best tokens for absolute `position` from `logits` [vocab], best first, each with its chance.

        With scores z = logits + T * noise the draw is the argmax of z. softmax(z) estimates its chance to be the
        target's draw too: without noise this is the model's own probability, with noise it grows with its lead in z.
        """
        scores, ids = self._candidates(logits)
        if not self.sampling.greedy:
            key = position_key(self.seed, self.choice, position)
            scores = scores + self.sampling.temperature * gumbel_noise(key, ids)
        best = scores.softmax(0).topk(min(count, len(ids)))
        tokens: list[int] = ids[best.indices].tolist()
        return tokens, best.values.tolist()

    def _candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The logits and ids of the likeliest tokens that pass top_k, min_p and top_p, in descending order."""
        sampling = self.sampling
        if legal := {token: bias for token, bias in sampling.logit_bias.items() if token < len(logits)}:
            logits = logits.index_add(0, *_pair(legal, logits))
        scores, ids = logits.topk(min(HEAD, sampling.top_k or HEAD, len(logits)))
        if sampling.greedy:
            return scores, ids
        chances = (scores / sampling.temperature - (logits / sampling.temperature).logsumexp(0)).exp()
        keep = (chances >= sampling.min_p * chances[0]) & (chances.cumsum(0) - chances < sampling.top_p)
        keep[0] = True
        return scores[keep], ids[keep]


def _pair(bias: dict[int, float], like: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tensor(list(bias), device=like.device), torch.tensor(list(bias.values()), device=like.device)
