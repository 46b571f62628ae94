"""Sampling: the law of the draws, the truncations, the history, and what the noise depends on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.backends.torch.sampler import Sampler, gumbel_noise, position_key
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


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits, draws = np.array([2.0, 1.0, 0.5, 0.0, -1.0, -3.0]), 20_000
    weights = np.exp(logits / temperature)
    expected = weights / weights.sum()
    counts = frequencies(logits, draws, temperature=temperature)
    assert np.abs(counts / draws - expected).sum() / 2 < 0.01
    chi2 = ((counts - draws * expected) ** 2 / (draws * expected)).sum()
    assert chi2 < 25.7  # 1e-4 quantile of chi square with 5 degrees of freedom


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


def test_the_same_seed_draws_the_same_and_another_seed_does_not() -> None:
    logits = np.zeros(1000)
    first, again, other = ([draw(sampler(1000, prompt=[0] * n, seed=s), logits) for n in range(20)] for s in (7, 7, 8))
    assert first == again != other


def test_without_a_seed_every_answer_gets_its_own() -> None:
    assert sampler(4).seed != sampler(4).seed


@settings(deadline=None)
@given(st.lists(st.floats(-5, 5, width=32), min_size=3, max_size=40), st.data())
def test_truncation_keeps_what_it_says(scores: list[float], data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, 45))
    top_p = data.draw(st.floats(0.05, 0.99))
    values = torch.tensor(scores)
    kept, _ = sampler(len(scores), top_k=top_k)._truncated(values)
    assert set(kept.tolist()) == {i for i, s in enumerate(scores) if sum(o > s for o in scores) < top_k}
    kept, _ = sampler(len(scores), top_p=top_p)._truncated(values)
    inside = values.softmax(0)[kept].sum()
    assert inside >= top_p - 1e-5
    lowest = values[kept].min()
    assert (values.softmax(0)[values > lowest]).sum() < top_p + 1e-5


def test_a_nucleus_wider_than_the_first_sort_is_found() -> None:
    scores = torch.linspace(0, 0.001, 5000)
    kept, _ = sampler(5000, top_p=0.9)._truncated(scores)
    assert 4480 <= len(kept) <= 4520


def test_min_p_is_relative_to_the_best() -> None:
    scores = torch.log(torch.tensor([0.6, 0.3, 0.07, 0.03]))
    kept, _ = sampler(4, min_p=0.11)._truncated(scores)
    assert kept.tolist() == [0, 1, 2]


def test_top_p_counts_within_top_k() -> None:
    scores = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    kept, _ = sampler(4, top_k=2, top_p=0.55)._truncated(scores)  # 0.4 of 0.7 is enough
    assert kept.tolist() == [0]


def test_penalties_count_the_answer_and_repetition_the_prompt_too() -> None:
    subject = sampler(
        4, prompt=[0], temperature=0, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0
    )
    subject.observe(1)
    subject.observe(1)
    scores = subject._penalties(torch.tensor([2.0, 4.0, 1.0, -1.0]))
    assert scores.tolist() == pytest.approx([1.0, 2.0 - 0.5 - 0.5, 1.0, -1.0])
    subject.observe(3)
    assert subject._penalties(torch.tensor([2.0, 4.0, 1.0, -1.0]))[3] == pytest.approx(-2.0 - 0.75)


def test_bias_is_added_before_everything_else() -> None:
    counts = frequencies([0.0, 0.0, 0.0], 200, temperature=1.0, logit_bias={2: 100.0})
    assert counts.tolist() == [0, 0, 200]


@pytest.mark.parametrize(("temperature", "waits"), [(0.0, 1), (0.8, 8)])
def test_how_often_a_round_waits_for_the_device(
    monkeypatch: pytest.MonkeyPatch, temperature: float, waits: int
) -> None:
    """Greedy answers once, however many tokens are drawn; sampled ones once for each token."""
    subject, logits, seen = sampler(64, temperature=temperature, seed=1), torch.randn(8, 64), [0]
    for name in ("tolist", "item", "__int__", "__float__", "__bool__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, counting(getattr(torch.Tensor, name), seen))
    subject.begin(logits)
    for row in range(8):
        subject.observe(subject.choose(row))
    monkeypatch.undo()
    assert seen == [waits]


def counting(method: Any, seen: list[int]) -> Any:
    """A tensor's method by which its values reach the host; the outermost call counts."""

    def counted(*args: Any) -> Any:
        before = seen[0]
        result = method(*args)
        seen[0] = before + 1
        return result

    return counted
