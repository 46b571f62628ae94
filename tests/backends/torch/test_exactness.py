"""The promise: with any drafter whatsoever the answer is the one that the model alone gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.torch.sampling.constraints import ConstraintSpec, ThinkingLimit
from agentspec.types import Draft, SamplingParams
from tests.backends.torch.conftest import laboratory, tree_of

Script = Callable[[list[int], int], Draft | None]

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "greedy, penalties": SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5),
    "plain": SamplingParams(temperature=1.0, seed=5),
    "cold nucleus": SamplingParams(temperature=0.3, top_p=0.9, seed=11),
    "hot nucleus": SamplingParams(temperature=1.7, top_p=0.9, seed=12),
    "top k": SamplingParams(temperature=0.8, top_k=3, seed=13),
    "min p": SamplingParams(temperature=0.9, min_p=0.1, seed=14),
    "penalties": SamplingParams(
        temperature=0.7, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2, seed=15
    ),
    "bias": SamplingParams(temperature=0.5, logit_bias={65: 4.0, 66: -100.0}, seed=16),
    "all": SamplingParams(
        temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, presence_penalty=0.3, frequency_penalty=-0.2,
        repetition_penalty=1.1, logit_bias={70: 2.0}, seed=17,
    ),
}  # fmt: skip

PROMPT = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100, 257, 40, 41, 258]


def drafters(answer: Sequence[int]) -> dict[str, Script]:
    """Drafters good and bad; `answer` is the right one, which some of them know in part."""
    whole, rng = [*PROMPT, *answer], np.random.default_rng(3)

    def right(text: list[int], budget: int) -> Draft:
        return tree_of.chain(whole[len(text) : len(text) + min(budget, 5)])

    def wrong(text: list[int], budget: int) -> Draft:
        rest = whole[len(text) : len(text) + min(budget, 5)] or [0]
        return tree_of.chain([(token + 1) % 256 for token in rest])

    def half_right(text: list[int], budget: int) -> Draft:
        rest = whole[len(text) : len(text) + min(budget, 6)] or [0]
        return tree_of.chain([token if i % 3 < 2 else (token + 1) % 256 for i, token in enumerate(rest)])

    def random_tree(text: list[int], budget: int) -> Draft:
        return tree_of.winding(whole[len(text) :], rng, min(budget, 20))

    return {
        "right": right,
        "always wrong": wrong,
        "half right": half_right,
        "random trees": random_tree,
        "constant": lambda text, budget: tree_of.chain([65] * min(budget, 8)),
        "end first": lambda text, budget: tree_of.chain([256, *whole[len(text) : len(text) + 2]]),
        "too long": lambda text, budget: tree_of.chain((whole[len(text) :] + [65] * 400)[:400]),
        "illegal ids": lambda text, budget: illegal(whole[len(text) :]),
        "wide": lambda text, budget: tree_of(list(range(40)), [-1] * 40),
        "nothing": lambda text, budget: None,
        "empty": lambda text, budget: tree_of([], []),
    }


def illegal(rest: Sequence[int]) -> Draft:
    """Ids the model does not have, a good node between them, and good nodes hanging on bad ones."""
    follow = list(rest[:2]) + [65] * (2 - len(rest[:2]))
    return tree_of([-1, 10**6, follow[0], 259, follow[0], follow[1]], [-1, -1, -1, 0, 1, 2])


def require_the_oracles_answer(lab: Any, sampling: SamplingParams) -> None:
    want = lab.oracle(PROMPT, sampling)
    lab.require_same(PROMPT, sampling, lab.run(PROMPT, sampling).tokens, want)
    scripts = drafters(want)
    for drafter, outcome in zip(scripts, lab.run_each(PROMPT, sampling, scripts.values()), strict=True):
        print(drafter, outcome.speculation)
        lab.require_same(PROMPT, sampling, outcome.tokens, want)
    assert not lab.divergences, "tiny float32 models should show no near-ties"


OFTEN = ("greedy", "all")  # what families that differ in their layers alone are asked each time
SELDOM = ("greedy, penalties", "cold nucleus", "top k", "bias")  # parts of "all"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SELDOM else name for name in SAMPLINGS]
)
def test_every_drafter_gives_the_oracles_answer(lab: Any, name: str) -> None:
    require_the_oracles_answer(lab, SAMPLINGS[name])


@pytest.mark.parametrize("family", ["gemma3", "gpt2"])
@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in SAMPLINGS]
)
def test_every_drafter_gives_the_oracles_answer_in_main_families(family: str, name: str) -> None:
    require_the_oracles_answer(laboratory(family), SAMPLINGS[name])


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.long) for name in SAMPLINGS]
)
def test_every_drafter_gives_the_oracles_answer_in_other_families(other_family: Any, name: str) -> None:
    require_the_oracles_answer(other_family, SAMPLINGS[name])


def test_good_drafts_are_accepted_and_save_steps(family: Any) -> None:
    sampling = SAMPLINGS["plain"]
    want = family.oracle(PROMPT, sampling)
    outcome = family.run(PROMPT, sampling, drafters(want)["right"])
    assert outcome.rounds == -(-len(want) // 6)
    assert outcome.speculation.accepted == len(want) - outcome.rounds
    assert outcome.speculation.steps == outcome.rounds


@pytest.mark.parametrize(
    "name", ["greedy", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cold nucleus", "penalties"))]
)
def test_the_end_of_thinking_falls_where_it_would_without_drafts(lab: Any, name: str) -> None:
    sampling, limit = SAMPLINGS[name], ThinkingLimit(7, end=47, begun=True)
    bounded: dict[str, Any] = {"constraints": ConstraintSpec(thinking=limit)}
    want = lab.run(PROMPT, sampling, **bounded).tokens
    free = lab.run(PROMPT, sampling).tokens
    assert 47 not in free[:7] and want[:8] == [*free[:7], 47] and len(want) > 8
    for outcome in lab.run_each(PROMPT, sampling, drafters(want).values(), **bounded):
        lab.require_same(PROMPT, sampling, outcome.tokens, want)


@given(data=st.data())
def test_any_request_with_any_trees(lab: Any, data: st.DataObject) -> None:
    """Sampling options, prompt, tree shapes and answer length drawn at random."""
    sampling = data.draw(samplings())
    prompt = data.draw(st.lists(st.integers(0, 258), min_size=1, max_size=12))
    max_tokens = data.draw(st.integers(1, 12))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    want = lab.oracle(prompt, sampling, max_tokens=max_tokens)
    whole = [*prompt, *want]
    outcome = lab.run(
        prompt,
        sampling,
        lambda text, budget: tree_of.winding(whole[len(text) :], rng, min(budget, 20)),
        max_tokens=max_tokens,
    )
    lab.require_same(prompt, sampling, outcome.tokens, want)


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.2, 0.7, 1.0, 2.0])),
        top_p=draw(st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.01])),
        top_k=draw(st.sampled_from([0, 1, 2, 20, 1000])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 1.0, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5, -1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.5, 0.7])),
        logit_bias=draw(st.dictionaries(st.integers(0, 258), st.floats(-100, 100), max_size=3)),
        seed=draw(st.integers(0, 2**63 - 1)),
    )
