"""Sampling: the law of the draws, the truncations, the history, and what the noise depends on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.backends.torch.engine.speculator import accept_path
from agentspec.backends.torch.grammars.grammar import GrammarCompiler
from agentspec.backends.torch.sampling.constraints import ConstraintSpec
from agentspec.backends.torch.sampling.distribution import (
    apply_top_k_top_p,
    gumbel_noise,
    gumbel_of,
    position_key,
)
from agentspec.backends.torch.sampling.sampler import Sampler, ancestor_tokens, fetch
from agentspec.types import SamplingParams

CPU = torch.device("cpu")


def draw(sampler: Sampler, logits: Any) -> int:
    sampler.begin(torch.as_tensor(logits, dtype=torch.float32)[None])
    return sampler.choose(0)


def sampler(vocab: int, prompt: Any = (), **params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), vocab, list(prompt), CPU)


def frequencies(logits: Any, draws: int, **params: Any) -> np.ndarray:
    """How often each token is drawn over consecutive positions of one answer."""
    subject, counts = sampler(len(logits), seed=1234, **params), np.zeros(len(logits))
    for _ in range(draws):
        token = draw(subject, logits)
        counts[token] += 1
        subject.observe(token)
    return counts


@pytest.mark.parametrize(
    ("temperature", "draws"),
    [
        (1.0, 3000),
        *(pytest.param(each, 3000, marks=pytest.mark.slow) for each in (0.5, 2.0)),
        *(pytest.param(each, 20_000, marks=pytest.mark.long) for each in (1.0, 0.5, 2.0)),
    ],
)
def test_draws_follow_the_softmax(temperature: float, draws: int) -> None:
    logits = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    weights = np.exp(logits / temperature)
    expected = weights / weights.sum()
    counts = frequencies(logits, draws, temperature=temperature)
    assert np.abs(counts / draws - expected).sum() / 2 < 1.5 / draws**0.5
    chi2 = ((counts - draws * expected) ** 2 / (draws * expected)).sum()
    assert chi2 < 25.7  # 1e-4 quantile of chi square with 5 degrees of freedom


def hashes() -> list[torch.Tensor]:
    """One hash for every float32 that hashes round to, in parts; those with the same float32 have the same noise."""
    parts = [torch.arange(start, start + (1 << 21)) for start in range(0, 1 << 24, 1 << 21)]
    for octave in range(8):
        step = 2 << octave
        parts += [torch.arange(start, 2 * start, step) for start in [1 << (24 + octave)]]
    return [*parts, torch.arange((1 << 32) - 1024, 1 << 32)]


@pytest.mark.slow
def test_noise_is_finite_over_the_whole_range_of_the_hash_and_clamped_only_where_it_was_not() -> None:
    clamped = 0
    for bits in hashes():
        noise = gumbel_of(bits)
        before = -torch.log(-torch.log1p(-(bits.to(torch.float32) + 0.5) * 2.0**-32))
        assert noise.isfinite().all()
        assert torch.equal(noise[before.isfinite()], before[before.isfinite()])
        clamped += int((~before.isfinite()).sum())
    assert clamped == 128  # of 2^32: the hashes that round to 1


@pytest.mark.parametrize("ahead", [True, False])
def test_the_only_allowed_token_is_drawn_with_any_noise(ahead: bool) -> None:
    """Its hash is one of those that round to 1: as -inf it would lose to token 0, which is forbidden."""
    only, position = 35955, 10
    assert gumbel_noise(position_key(718, 0, position), torch.tensor([only])).isfinite().all()
    logits = torch.full((1, 49152), -math.inf)
    logits[0, only] = 1.5
    params = SamplingParams(temperature=1.0, seed=718)
    subject = Sampler(params, 49152, [1] * position, CPU, ahead=ahead)
    subject.begin(logits)
    assert subject.choose(0) == only


def test_noise_is_standard_gumbel_and_independent_between_ids_positions_and_seeds() -> None:
    ids = torch.arange(200_000)
    noise = gumbel_noise(position_key(1, 0, 0), ids).double().numpy()
    assert abs(noise.mean() - 0.5772156649) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.03
    probabilities = np.exp(-np.exp(-np.sort(noise)))  # uniform if Gumbel
    assert np.abs(probabilities - (np.arange(len(ids)) + 0.5) / len(ids)).max() < 0.005
    for other in (position_key(1, 0, 1), position_key(2, 0, 0), position_key(1, 1, 0)):
        assert abs(np.corrcoef(noise, gumbel_noise(other, ids).double().numpy())[0, 1]) < 0.01
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.01


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 200_000), min_size=1, max_size=20, unique=True))
def test_noise_of_a_token_does_not_depend_on_which_others_survive(key: int, ids: list[int]) -> None:
    together = gumbel_noise(key, torch.tensor(ids))
    alone = torch.cat([gumbel_noise(key, torch.tensor([i])) for i in ids])
    assert torch.allclose(together, alone, rtol=1e-6)


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    assert draw(sampler(5, temperature=0), [1.0, 3.0, 3.0, 2.0, 3.0]) == 1
    assert draw(sampler(5, temperature=0, logit_bias={3: 1.0}), [1.0, 3.0, 3.0, 2.0, 3.0]) == 1
    assert draw(sampler(3, temperature=1e-8, seed=0), [1.0, 3.0, 2.0]) == 1


@st.composite
def requests(draw: st.DrawFn, vocab: int) -> dict[str, Any]:
    """Sampling options, most of them off most of the time."""

    def rarely(usual: Any, *others: Any) -> Any:
        return draw(st.sampled_from([usual, usual, *others]))

    return {
        "temperature": draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
        "min_p": rarely(0.0, 0.05, 0.5, 1.0),
        "top_k": rarely(0, 1, 3, 50, 2000),
        "top_p": rarely(1.0, 0.999, 0.9, 0.5, 0.01),
        "presence_penalty": rarely(0.0, 0.7),
        "frequency_penalty": rarely(0.0, 0.4, -0.5),
        "repetition_penalty": rarely(1.0, 1.3, 0.8),
        "logit_bias": rarely({}, {1: 2.0, vocab - 1: -1.0}),
        "seed": draw(st.integers(0, 2**63 - 1)),
    }  # fmt: skip


@st.composite
def trees(draw: st.DrawFn, vocab: int) -> tuple[list[int], list[int]]:
    """Tokens, some of them the same along a path, and parents."""
    size = draw(st.integers(0, 9))
    token = st.one_of(st.integers(0, 2), st.integers(0, vocab - 1))
    return [draw(token) for _ in range(size)], [draw(st.integers(-1, node - 1)) for node in range(size)]


@pytest.mark.parametrize("vocab", [3, 7, 4096])
@given(data=st.data())
def test_drawing_ahead_equals_drawing_row_by_row(vocab: int, data: st.DataObject) -> None:
    """Whatever node a walk comes to; scores are coarse, so that many are equal."""
    params, (tokens, parents) = data.draw(requests(vocab)), data.draw(trees(vocab))
    prompt, said = data.draw(st.lists(st.integers(0, vocab - 1), max_size=4)), data.draw(st.integers(0, 2))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    logits = torch.tensor(rng.integers(-12, 12, (1 + len(tokens), vocab)) / 4, dtype=torch.float32)
    ahead = Sampler(SamplingParams(**params), vocab, prompt, CPU, ahead=True)
    for token in [vocab // 2] * said:
        ahead.observe(token)
    ahead.begin(logits, tokens, parents)
    fetch([ahead])
    for row, path in enumerate(ancestor_tokens(tokens, parents)):
        alone = Sampler(SamplingParams(**params), vocab, prompt, CPU, ahead=False)
        for token in [*[vocab // 2] * said, *path]:
            alone.observe(token)
        alone.begin(logits[row][None])
        assert ahead.drawn is not None and ahead.drawn[row] == alone.choose(0)


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 2}, {"presence_penalty": 1.5}, {"temperature": 0}])
@pytest.mark.parametrize("seed", range(20))
def test_drawing_ahead_under_constraints_equals_drawing_row_by_row(
    byte_tokens: Any, params: dict[str, Any], seed: int
) -> None:
    """A grammar, a bad word, an end that may not come yet; some of the tokens drawn freely are allowed, others not."""
    grammar = GrammarCompiler(byte_tokens, 259, [256]).compile("start: /[a-m]{4,9}/", param="p")
    letters = [byte_tokens.encode(letter)[0] for letter in "abcd"]
    sampling = SamplingParams(**{"temperature": 1.0, "seed": seed, **params}, min_tokens=5)
    logits = torch.randn(9, 259, generator=torch.Generator().manual_seed(seed))
    logits[:, letters] += 4
    drafts = [letters[row % 4] for row in range(8)]

    def answer(ahead: bool) -> list[int]:
        limits = ConstraintSpec(grammar, ((letters[0], letters[1]),)).start(sampling.min_tokens, [256], 259)
        subject, said = Sampler(sampling, 259, [1], CPU, constraints=limits, ahead=ahead), list[int]()

        def emit(token: int, row: int) -> bool:
            subject.observe(token)
            said.append(token)
            return token == 256

        while len(said) < 12 and said[-1:] != [256]:
            subject.begin(logits, drafts, range(-1, 7))
            accept_path(drafts, range(-1, 7), subject.choose, emit)
        return said

    assert answer(ahead=True) == answer(ahead=False)


def kept(scores: torch.Tensor, **params: Any) -> list[int]:
    """The surviving ids of one row."""
    patient, hasty = (
        apply_top_k_top_p(scores[None], SamplingParams(**params), may_sync=patient) for patient in (True, False)
    )
    assert torch.equal(patient, hasty)
    left = patient[0] > -torch.inf
    assert torch.equal(patient[0][left], scores[left])
    return left.nonzero()[:, 0].tolist()  # type: ignore[no-any-return]


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5, width=32), min_size=3, max_size=40), st.data())
def test_truncation_leaves_the_tokens_of_its_definition(scores: list[float], data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, 45))
    top_p = data.draw(st.floats(0.05, 0.99))
    values = torch.tensor(scores)
    assert set(kept(values, top_k=top_k)) == {i for i, s in enumerate(scores) if sum(o > s for o in scores) < top_k}
    left = kept(values, top_p=top_p)
    assert values.softmax(0)[left].sum() >= top_p - 1e-5
    lowest = values[left].min()
    assert (values.softmax(0)[values > lowest]).sum() < top_p + 1e-5


def test_a_nucleus_wider_than_the_first_sort_is_found() -> None:
    assert 4480 <= len(kept(torch.linspace(0, 0.001, 5000), top_p=0.9)) <= 4520


def test_top_p_counts_all_that_equal_the_last_of_top_k() -> None:
    """0.4 is less than half of what survives top_k: 0.4 and three times 0.2."""
    scores = torch.log(torch.tensor([0.2, 0.4, 0.2, 0.2]))
    assert kept(scores, top_k=2) == [0, 1, 2, 3] == kept(scores, top_k=2, top_p=0.5)
    assert kept(scores, top_k=2, top_p=0.35) == [1]
