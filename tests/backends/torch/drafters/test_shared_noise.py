"""A draft's draws are the target's where the models agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agentspec.backends.torch.drafters.draft_model import SharedNoiseSampler
from agentspec.backends.torch.sampling.sampler import Sampler
from agentspec.types import SamplingParams

SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.4, top_p=0.8),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(temperature=0.9, min_p=0.1),
    SamplingParams(temperature=0.7, logit_bias={3: 5.0, 10**6: 1.0}, top_p=0.95),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_equal_logits_give_the_targets_own_draw(sampling: SamplingParams) -> None:
    noise = torch.Generator().manual_seed(1)
    for position in range(2, 60):
        logits = 3 * torch.randn(60, generator=noise)
        legal = {token: bias for token, bias in sampling.logit_bias.items() if token < 60}
        known = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        target = Sampler(SamplingParams(**known, logit_bias=legal, seed=9), 60, [0] * position, torch.device("cpu"))
        target.begin(logits[None])
        tokens, shares = SharedNoiseSampler(sampling, 9).rank(logits, position, 3)
        assert tokens[0] == target.choose(0)
        assert shares == sorted(shares, reverse=True) and len(set(tokens)) == len(tokens) <= 3


def test_greedy_chances_are_the_models_own() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0])
    tokens, shares = SharedNoiseSampler(SamplingParams(temperature=0), 0).rank(logits, 5, 2)
    assert tokens == [1, 2] and shares == pytest.approx(logits.softmax(0)[[1, 2]].tolist())


def test_the_same_noise_recovers_acceptance_that_other_noise_loses() -> None:
    """Two models whose logits differ a little, at temperature 1: coupled draws agree far more often."""
    generator, agreed = torch.Generator().manual_seed(2), np.zeros(2)
    sampling = SamplingParams(temperature=1.0, seed=4)
    for position in range(1, 300):
        logits = 2 * torch.randn(50, generator=generator)
        close = logits + 0.2 * torch.randn(50, generator=generator)
        target = Sampler(sampling, 50, [0] * position, torch.device("cpu"))
        target.begin(logits[None])
        token = target.choose(0)
        for other, seed in enumerate((4, 5)):
            agreed[other] += SharedNoiseSampler(sampling, seed).rank(close, position, 1)[0] == [token]
    assert agreed[0] > 0.85 * 299 and agreed[1] < 0.4 * 299
