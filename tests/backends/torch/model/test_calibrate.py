from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, GPT2Config

from agentspec.backends.torch.loader import FAR, PASSES, SEQUENCES, SIZES, measure_batches, measure_costs
from agentspec.backends.torch.model.target import TargetModel


def test_every_size_is_timed_and_a_long_context_too(lab: Any) -> None:
    samples = measure_costs(lab.target, 60.0)
    assert {tokens for tokens, context, _ in samples if context == 0} == set(SIZES)
    far = min(FAR, lab.target.context_length - max(SIZES))
    assert {tokens for tokens, context, _ in samples if context == far} == {1, 16}
    assert all(seconds > 0 for _, _, seconds in samples)


def test_no_size_is_beyond_the_context() -> None:
    config = GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1, n_positions=12)
    samples = measure_costs(TargetModel(AutoModelForCausalLM.from_config(config).eval()), 60.0)
    assert {(tokens, context) for tokens, context, _ in samples} == {(1, 0), (2, 0), (4, 0), (8, 0), (1, 4), (8, 4)}


def test_several_sequences_in_one_forward_are_timed(lab: Any) -> None:
    samples = measure_batches(lab.target)
    assert sorted(count for count, _ in samples) == sorted([*SEQUENCES] * PASSES)
    assert all(seconds > 0 for _, seconds in samples)
