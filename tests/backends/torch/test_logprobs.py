from __future__ import annotations

import math

import pytest
import torch

from agentspec.backends.torch.logprobs import token_logprob


def test_token_and_alternatives_have_natural_log_probabilities() -> None:
    logits = torch.log(torch.tensor([0.1, 0.6, 0.3]))
    entry = token_logprob(logits, 0, 2, lambda token: f"<{token}>")
    assert (entry.token_id, entry.text) == (0, "<0>")
    assert entry.logprob == pytest.approx(math.log(0.1))
    assert [(other.token_id, other.text) for other in entry.top] == [(1, "<1>"), (2, "<2>")]
    assert [other.logprob for other in entry.top] == pytest.approx([math.log(0.6), math.log(0.3)])


def test_more_alternatives_than_tokens() -> None:
    assert len(token_logprob(torch.zeros(3), 1, 20, str).top) == 3
