from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from agentspec.backends.torch.logprobs import CHUNK, PromptScorer, token_logprob


def test_token_and_alternatives_have_natural_log_probabilities() -> None:
    logits = torch.log(torch.tensor([0.1, 0.6, 0.3]))
    entry = token_logprob(logits, 0, 2, lambda token: f"<{token}>")
    assert (entry.token_id, entry.text) == (0, "<0>")
    assert entry.logprob == pytest.approx(math.log(0.1))
    assert [(other.token_id, other.text) for other in entry.top] == [(1, "<1>"), (2, "<2>")]
    assert [other.logprob for other in entry.top] == pytest.approx([math.log(0.6), math.log(0.3)])


def test_more_alternatives_than_tokens() -> None:
    assert len(token_logprob(torch.zeros(3), 1, 20, str).top) == 3


@pytest.mark.parametrize("length", [1, 2, CHUNK + 1, CHUNK + 2, 2 * CHUNK + 7])
def test_a_prompt_is_scored_as_the_model_alone_scores_it(lab: Any, length: int) -> None:
    prompt = [(7 * position * position + 3) % 256 for position in range(length)]
    scorer = PromptScorer(lab.target, prompt, 3, lab.codec.spell)
    entries = scorer.finish()
    assert scorer.done and len(entries) == length - 1
    for place in {1, 2, CHUNK, CHUNK + 1, length - 2, length - 1} & set(range(1, length)):
        entry, scores = entries[place - 1], torch.tensor(lab.logits(prompt[:place])).log_softmax(-1)
        own = float(scores[prompt[place]])
        assert entry.token_id == prompt[place] and entry.logprob == pytest.approx(own, abs=1e-3)
        assert entry.rank == int((scores > own).sum()) + 1
        assert [one.token_id for one in entry.top] == scores.topk(3).indices.tolist()
        assert [one.rank for one in entry.top] == [1, 2, 3]
