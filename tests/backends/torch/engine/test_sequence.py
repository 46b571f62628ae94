"""One answer: its text, its end, its numbers; the same with and without drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from agentspec.speculation.governor import CHUNKS, Governor
from agentspec.types import SamplingParams

PROMPT = list(b"Once upon a time")
PLAIN = SamplingParams(temperature=1.0, seed=3, logit_bias={256: -100.0, 257: -100.0, 258: -100.0})


def knowing(whole: list[int], tree_of: Any, size: int = 5) -> Any:
    """Drafts the right continuation."""

    def script(text: list[int], budget: int) -> Any:
        rest = whole[len(text) : len(text) + min(budget, size)]
        return tree_of(rest, range(-1, len(rest) - 1))

    return script


def with_stop(*stop: str) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=3, logit_bias=PLAIN.logit_bias, stop=stop)


def test_text_is_the_decoded_answer(lab: Any, tree_of: Any) -> None:
    tokens = lab.oracle(PROMPT, PLAIN)
    for script in (None, knowing([*PROMPT, *tokens], tree_of)):
        outcome = lab.run(PROMPT, PLAIN, script)
        assert outcome.text == lab.tokenizer.decode(tokens)
        assert outcome.finish == "length"


@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_stop_strings_end_the_answer_wherever_they_fall_in_a_draft(
    lab: Any, ask_of: Any, tree_of: Any, size: int
) -> None:
    letters = {lab.tokenizer.encode(chr(code))[0] for code in range(32, 127)}
    ascii_only = {token: -100.0 for token in range(259) if token not in letters}
    params: dict[str, Any] = {"temperature": 1.0, "seed": 3, "logit_bias": ascii_only}
    tokens = lab.oracle(PROMPT, SamplingParams(**params))
    text = lab.tokenizer.decode(tokens)
    script = knowing([*PROMPT, *tokens], tree_of, size)
    stops = {text[start : start + length] for start in range(len(text)) for length in (1, 2, 4)}
    asks = [ask_of(PROMPT, SamplingParams(**params, stop=(stop, "\n never")), script) for stop in sorted(stops)]
    for ask, outcome in zip(asks, lab.run_batch(asks), strict=True):
        stop, _ = ask.sampling.stop
        end = text.index(stop) + len(stop)
        assert outcome.text == text[: text.index(stop)]
        assert outcome.finish == "stop"
        assert outcome.tokens == tokens[:end]  # one byte, one token: nothing past the stop string


def test_held_back_text_comes_when_the_answer_ends(lab: Any) -> None:
    tokens = lab.oracle(PROMPT, PLAIN)
    text = lab.tokenizer.decode(tokens)
    outcome = lab.run(PROMPT, with_stop(text[-3:] + "never"))
    assert outcome.text == text and outcome.finish == "length"


def test_a_stop_id_is_a_token_without_text(lab: Any) -> None:
    tokens = lab.oracle(PROMPT, PLAIN)
    outcome = lab.run(PROMPT, PLAIN, stop_ids=[tokens[4]])
    assert outcome.tokens == tokens[: tokens.index(tokens[4]) + 1]
    assert outcome.text == lab.tokenizer.decode(outcome.tokens[:-1])


def test_logprobs_are_of_the_raw_distribution(family: Any, tree_of: Any) -> None:
    sampling = SamplingParams(temperature=0.3, top_k=2, seed=9, logprobs=True, top_logprobs=3)
    tokens = family.oracle(PROMPT, sampling)
    wants = [family.logits([*PROMPT, *tokens[:i]]) for i in range(len(tokens))]
    for script in (None, knowing([*PROMPT, *tokens], tree_of)):
        outcome = family.run(PROMPT, sampling, script)
        assert [entry.token_id for entry in outcome.logprobs] == outcome.tokens == tokens
        for entry, logits in zip(outcome.logprobs, wants, strict=True):
            want = torch.tensor(logits).log_softmax(-1).numpy()
            assert entry.logprob == pytest.approx(float(want[entry.token_id]), abs=1e-3)
            assert [other.token_id for other in entry.top] == np.argsort(-want)[:3].tolist()
            assert entry.top[0].logprob == pytest.approx(float(want.max()), abs=1e-3)


def test_logprobs_without_alternatives(lab: Any) -> None:
    outcome = lab.run(PROMPT, SamplingParams(temperature=0, logprobs=True), max_tokens=3)
    assert [len(entry.top) for entry in outcome.logprobs] == [0, 0, 0]
    assert all(entry.text == lab.tokenizer.spell(entry.token_id) for entry in outcome.logprobs)


def test_usage_counts_tokens(lab: Any) -> None:
    usage = lab.run(PROMPT, PLAIN, max_tokens=7).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (len(PROMPT), 7, 0)
    assert usage.accepted_prediction_tokens is None and usage.rejected_prediction_tokens is None


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


def test_a_wrong_prediction_changes_nothing(lab: Any) -> None:
    outcome = lab.run(PROMPT, PLAIN, prediction=[1, 2, 3, 4])
    assert outcome.tokens == lab.oracle(PROMPT, PLAIN)
    assert outcome.usage.accepted_prediction_tokens <= 1


def test_a_long_prompt_is_read_in_chunks_and_its_last_one_carries_a_draft(
    lab: Any, tree_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.speculation.governor.LARGE_CHUNKS", ())
    prompt = (PROMPT * 40)[: CHUNKS[0] + 50]
    tokens = lab.oracle(prompt, PLAIN, max_tokens=6)
    outcome = lab.run(prompt, PLAIN, knowing([*prompt, *tokens], tree_of), max_tokens=6)
    lab.require_same(prompt, PLAIN, outcome.tokens, tokens)
    assert outcome.rounds == 1


def test_an_answer_without_a_seed_can_be_had_again(lab: Any) -> None:
    free = lab.run(PROMPT, SamplingParams(temperature=1.5))
    again = SamplingParams(temperature=1.5, seed=free.sequence.seed)
    assert lab.run(PROMPT, again).tokens == free.tokens == lab.oracle(PROMPT, again)


def test_speculation_is_reported_only_where_there_was_any(lab: Any) -> None:
    assert lab.run(PROMPT, PLAIN, max_tokens=3).speculation is None
    assert lab.run(PROMPT, PLAIN, lambda text, budget: None, max_tokens=3).speculation.steps == 3
    assert lab.run(PROMPT, PLAIN, lambda text, budget: None, max_tokens=3, max_draft=0).speculation is None


def test_the_real_governor_changes_no_token(family: Any, tree_of: Any) -> None:
    tokens = family.oracle(PROMPT, PLAIN, max_tokens=30)
    script = knowing([*PROMPT, *tokens], tree_of, 8)
    outcome = family.run(PROMPT, PLAIN, script, max_tokens=30, governor=Governor())
    family.require_same(PROMPT, PLAIN, outcome.tokens, tokens)
    assert outcome.rounds < 30
