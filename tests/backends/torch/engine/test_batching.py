"""Answers made together are the answers made alone: ragged trees, chunked prompts, preemption, every family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.torch.engine import engine as step
from agentspec.backends.torch.engine.scheduler import plan_step
from agentspec.backends.torch.engine.sequence import Sequence as EngineSequence
from agentspec.backends.torch.model.batch import BatchItem
from agentspec.backends.torch.model.kv_cache import SequenceCache
from agentspec.backends.torch.model.target import TargetModel
from agentspec.speculation.governor import CHUNKS, Governor
from agentspec.types import SamplingParams
from tests.backends.torch.conftest import Ask, Lab, tiny, tree_of

TOLERANCE = 2e-4
PROMPT = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100, 257, 40, 41, 258]
SAMPLINGS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.3, top_p=0.9, seed=11),
    SamplingParams(temperature=0.9, top_k=40, frequency_penalty=0.7, repetition_penalty=1.2, seed=17),
)


def path(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    return [] if node < 0 else [*path(tokens, parents, parents[node]), tokens[node]]


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[int], bool]:
    """Committed tokens, a chain, a tree behind it, and whether logits are wanted."""
    token = st.integers(0, 258)
    before, chain = draw(st.lists(token, max_size=12)), draw(st.lists(token, min_size=1, max_size=7))
    tokens = draw(st.lists(token, max_size=6))
    parents = [draw(st.integers(-1, node - 1)) for node in range(len(tokens))]
    wanted = draw(st.booleans())
    return before, chain, tokens if wanted else [], parents if wanted else [], wanted


@given(data=st.data())
def test_packed_logits_are_those_of_each_path_alone(family: Any, data: st.DataObject) -> None:
    parts = data.draw(st.lists(sequences(), min_size=1, max_size=5))
    items = []
    for before, chain, tokens, parents, wanted in parts:
        rows = family.target.new_cache(data.draw(st.integers(1, 40)))
        if before:
            family.target.prefill(rows, before)
        items.append(BatchItem(rows, chain, tokens, parents, wanted))
    outputs = family.target.forward_batch(items)
    for (before, chain, tokens, parents, wanted), logits in zip(parts, outputs, strict=True):
        assert logits.shape == ((1 + len(tokens)) * wanted, 259) and logits.dtype == torch.float32
        for row, got in enumerate(logits):
            want = family.logits([*before, *chain, *path(tokens, parents, row - 1)])
            assert np.abs(got.cpu().numpy() - want).max() < TOLERANCE


def winding(whole: Sequence[int], rng: np.random.Generator) -> Any:
    """Random trees through which the right path winds, now and then; now and then none."""
    return lambda text, budget: tree_of.winding(whole[len(text) :], rng, int(rng.integers(0, 12)))


def asks_of(lab: Any, count: int, **options: Any) -> tuple[list[Any], list[list[int]]]:
    """So many requests, all different, and the oracle's answers."""
    asks, wants = [], []
    for index in range(count):
        prompt = [*PROMPT[: 3 + index % 9], index]
        sampling, length = SAMPLINGS[index % len(SAMPLINGS)], 8 + 3 * (index % 5)
        want = lab.oracle(prompt, sampling, max_tokens=length)
        script = winding([*prompt, *want], np.random.default_rng(index)) if index % 3 else None
        asks.append(Ask(prompt, sampling, script, max_tokens=length, **options))
        wants.append(want)
    return asks, wants


def require_all(lab: Any, asks: Sequence[Any], outcomes: Sequence[Any], wants: Sequence[list[int]]) -> None:
    for ask, outcome, want in zip(asks, outcomes, wants, strict=True):
        lab.require_same(ask.prompt, ask.sampling, outcome.tokens, want)


@pytest.mark.parametrize("count", [1, 2, 8, pytest.param(16, marks=pytest.mark.slow)])
def test_a_batch_gives_the_answers_of_one_at_a_time(family: Any, count: int) -> None:
    asks, wants = asks_of(family, count)
    outcomes = family.run_batch(asks)
    require_all(family, asks, outcomes, wants)
    assert not family.divergences
    assert [outcome.usage.completion_tokens for outcome in outcomes] == [len(want) for want in wants]


@given(data=st.data())
def test_answers_are_unchanged_when_others_join_leave_or_lose_slots(lab: Any, data: st.DataObject) -> None:
    """Before any step some answers rest, some are cancelled, and some give up all or some of their rows."""
    asks, wants = asks_of(lab, data.draw(st.integers(2, 6)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    cancelled: list[EngineSequence] = []

    def between(active: list[EngineSequence]) -> None:
        for sequence in list(active):
            chance = rng.random()
            if chance < 0.1 and isinstance(sequence.kv_cache, SequenceCache):
                sequence.kv_cache.truncate(int(rng.integers(0, sequence.kv_cache.length + 1)))
            elif chance < 0.2:
                sequence.kv_cache = lab.target.new_cache(1)
            elif chance < 0.23 and len(active) > 1:
                active.remove(sequence)
                cancelled.append(sequence)
        rng.shuffle(active)  # type: ignore[arg-type]

    outcomes = lab.run_batch(asks, between=between)
    for ask, outcome, want in zip(asks, outcomes, wants, strict=True):
        whole = outcome.sequence not in cancelled
        lab.require_same(ask.prompt, ask.sampling, outcome.tokens, want if whole else want[: len(outcome.tokens)])


def test_a_long_prompt_is_read_in_chunks_while_answers_run(lab: Any) -> None:
    """A slow machine: prompts are read in the smallest chunks, and the answer that runs gains a token in every step."""
    governor = Governor()
    governor.cost.calibrate([(1, 0, 0.01), (48, 0, 0.48)])
    governor.cost.observe = lambda *args: None  # type: ignore[method-assign]
    shared = step.EngineContext(lab.target, lab.tokenizer, governor=governor)
    asks = [Ask(PROMPT, SAMPLINGS[1], max_tokens=20, stop_ids=()), Ask(PROMPT * 20, SAMPLINGS[1], max_tokens=1)]
    short, long = (ask.begin(shared, None) for ask in asks)
    with torch.inference_mode():
        step.run_step(plan_step([short], shared), shared)
        for chunk in range(1, 10):
            step.run_step(plan_step([short, long], shared), shared)
            assert (len(short.tokens), long.kv_cache.length) == (len(PROMPT) + 1 + chunk, CHUNKS[-1] * chunk)
        step.run_step(plan_step([short, long], shared), shared)
    assert long.finish == "length"
    for ask, sequence in zip(asks, (short, long), strict=True):
        answer = sequence.tokens[len(ask.prompt) :]
        want = lab.oracle(ask.prompt, ask.sampling, max_tokens=len(answer), stop_ids=())
        lab.require_same(ask.prompt, ask.sampling, answer, want)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_that_cannot_be_packed_goes_one_at_a_time(attention: str) -> None:
    lab = Lab(tiny("gemma3"))
    lab.target.module.set_attn_implementation(attention)
    lab.target = TargetModel(lab.target.module)
    assert not lab.target.batched
    asks, wants = asks_of(lab, 3)
    require_all(lab, asks, lab.run_batch(asks), wants)


def test_positions_that_depend_on_the_longest_sequence_are_not_mixed(lab: Any) -> None:
    module = tiny("llama")
    module.set_attn_implementation(lab.target.attention)
    assert TargetModel(module).batched
    module.config.rope_parameters = {**module.config.rope_parameters, "rope_type": "longrope"}
    assert not TargetModel(module).batched
    module.config.rope_parameters = {"full_attention": {"rope_type": "default"}, "sliding": {"rope_type": "dynamic"}}
    assert not TargetModel(module).batched


def test_the_real_governor_changes_no_answer_in_a_batch(family: Any) -> None:
    asks, wants = asks_of(family, 6)
    require_all(family, asks, family.run_batch(asks, governor=Governor()), wants)
