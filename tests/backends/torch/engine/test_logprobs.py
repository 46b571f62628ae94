from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from agentspec.backends.torch.engine.logprobs import CHUNK, PromptScorer, token_logprobs


@pytest.mark.parametrize("top", [0, 1, 7])
def test_rows_together_have_the_values_of_each_alone_and_come_in_one_transfer(waits: Any, top: int) -> None:
    """To the last bit, ties and tokens that cannot be among them."""
    logits, tokens = (torch.randn(9, 500) * 8).round() / 2, list(range(0, 450, 50))
    logits[3, 150] = logits[4, 7] = -torch.inf
    with waits(seen := Counter[str]()):
        entries = token_logprobs(logits, tokens, top, str)
    assert seen == {"cpu": 1}
    for row, token, entry in zip(logits, tokens, entries, strict=True):
        scores = row.log_softmax(-1)
        best = scores.topk(top)
        assert (entry.token_id, entry.text, entry.logprob) == (token, str(token), float(scores[token]))
        assert entry.rank == int((row > row[token]).sum()) + 1
        assert [one.token_id for one in entry.top] == best.indices.tolist()
        assert [one.logprob for one in entry.top] == best.values.tolist()
        assert [one.rank for one in entry.top] == list(range(1, top + 1))


@pytest.mark.parametrize("length", [1, 2, CHUNK + 1, CHUNK + 2, 2 * CHUNK + 7])
def test_a_prompt_is_scored_as_the_model_alone_scores_it(lab: Any, length: int) -> None:
    prompt = [(7 * position * position + 3) % 256 for position in range(length)]
    scorer = PromptScorer(lab.target, prompt, 3, lab.tokenizer.spell)
    cache = lab.target.new_cache(1)
    while not scorer.done:
        scorer.step(cache)
    entries = scorer.entries
    assert cache.length == length - 1  # what was read need not be read again
    assert scorer.done and len(entries) == length - 1
    for place in {1, 2, CHUNK, CHUNK + 1, length - 2, length - 1} & set(range(1, length)):
        entry, scores = entries[place - 1], torch.tensor(lab.logits(prompt[:place])).log_softmax(-1)
        own = float(scores[prompt[place]])
        assert entry.token_id == prompt[place] and entry.logprob == pytest.approx(own, abs=1e-3)
        assert entry.rank == int((scores > own).sum()) + 1
        assert [one.token_id for one in entry.top] == scores.topk(3).indices.tolist()
        assert [one.rank for one in entry.top] == [1, 2, 3]


@pytest.mark.parametrize("kept", [0, 1, 40, CHUNK, CHUNK + 9])
def test_scoring_goes_on_where_it_stood_with_whatever_slots_there_are(lab: Any, kept: int) -> None:
    """A preempted sequence resumes with fewer slots than it had, or with more, of an earlier call."""
    prompt = [(7 * position * position + 3) % 256 for position in range(CHUNK + 30)]
    whole, halted = (PromptScorer(lab.target, prompt, 2, lab.tokenizer.spell) for _ in range(2))
    halted.step(lab.target.new_cache(1))
    other = lab.target.new_cache(1)
    if kept:
        lab.target.prefill(other, prompt[:kept])
    for scorer, rows in ((halted, other), (whole, lab.target.new_cache(1))):
        while not scorer.done:
            scorer.step(rows)
    assert [entry.token_id for entry in halted.entries] == [entry.token_id for entry in whole.entries]
    for entry, want in zip(halted.entries, whole.entries, strict=True):
        assert entry.logprob == pytest.approx(want.logprob, abs=1e-3) and entry.rank == want.rank
