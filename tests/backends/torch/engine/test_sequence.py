"""One answer: its text, its end, its numbers; the same with and without drafts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from agentspec.backends.torch.sampling.distribution import token_logprobs
from agentspec.types import SamplingParams
from tests.backends.torch.conftest import tree_of

PROMPT = list(b"Once upon a time")
PLAIN = SamplingParams(temperature=1.0, seed=3, logit_bias={256: -100.0, 257: -100.0, 258: -100.0})


def knowing(whole: list[int], size: int = 5) -> Any:
    """Drafts the right continuation."""

    def script(text: list[int], budget: int) -> Any:
        rest = whole[len(text) : len(text) + min(budget, size)]
        return tree_of(rest, range(-1, len(rest) - 1))

    return script


def test_logprobs_are_of_the_raw_distribution(family: Any) -> None:
    sampling = SamplingParams(temperature=0.3, top_k=2, seed=9, logprobs=True, top_logprobs=3)
    tokens = family.oracle(PROMPT, sampling)
    wants = [family.logits([*PROMPT, *tokens[:i]]) for i in range(len(tokens))]
    for script in (None, knowing([*PROMPT, *tokens])):
        outcome = family.run(PROMPT, sampling, script)
        assert [entry.token_id for entry in outcome.logprobs] == outcome.tokens == tokens
        for entry, logits in zip(outcome.logprobs, wants, strict=True):
            want = torch.tensor(logits).log_softmax(-1).numpy()
            assert entry.logprob == pytest.approx(float(want[entry.token_id]), abs=1e-3)
            assert [other.token_id for other in entry.top] == np.argsort(-want)[:3].tolist()
            assert entry.top[0].logprob == pytest.approx(float(want.max()), abs=1e-3)


@pytest.mark.parametrize("max_draft", [0, 48])
def test_prediction_counts_are_those_of_the_text_and_not_of_the_schedule(lab: Any, max_draft: int) -> None:
    tokens = lab.oracle(PROMPT, PLAIN)
    prediction = [*tokens[:10], 1, 2, 3, *tokens[10:]]
    outcome = lab.run(PROMPT, PLAIN, prediction=prediction, max_draft=max_draft)
    assert outcome.tokens == tokens
    usage = outcome.usage
    assert 10 <= usage.accepted_prediction_tokens <= len(tokens)
    assert usage.rejected_prediction_tokens == len(prediction) - usage.accepted_prediction_tokens
    assert (
        usage.accepted_prediction_tokens
        == lab.run(PROMPT, PLAIN, prediction=prediction).usage.accepted_prediction_tokens
    )
    assert (outcome.rounds < len(tokens)) == (max_draft > 0)


def test_an_answer_without_a_seed_is_reproduced_by_its_drawn_seed(lab: Any) -> None:
    free = lab.run(PROMPT, SamplingParams(temperature=1.5))
    again = SamplingParams(temperature=1.5, seed=free.sequence.seed)
    assert lab.run(PROMPT, again).tokens == free.tokens == lab.oracle(PROMPT, again)


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
        assert [one.token_id for one in entry.top] == best.indices.tolist()
        assert [one.logprob for one in entry.top] == best.values.tolist()
