"""The stride that pays best, by the formula and by what was measured."""

from __future__ import annotations

import pytest

from agentspec.reasoning.retrieval.knn.decoder import KnnStride
from agentspec.speculation.stride import MOST, expected


def learned(guess: float, search: float, right: int, wrong: int) -> KnnStride:
    stride = KnnStride()
    stride.guessed(guess)
    stride.searched(search)
    for _ in range(wrong):
        stride.verified(right // wrong, wrong=True)
    return stride


def test_it_begins_with_one_by_one() -> None:
    assert KnnStride().choose() == 1
    stride = KnnStride()
    stride.guessed(1.0)
    assert stride.choose() == 1


@pytest.mark.parametrize(("guess", "search", "gamma"), [(1, 1, 0.5), (1, 5, 0.8), (2, 1, 0.9)])
def test_it_is_the_best_of_all(guess: float, search: float, gamma: float) -> None:
    stride = learned(guess, search, 0, 0)
    for _ in range(8):
        stride.verified(round(10 * gamma / (1 - gamma)), wrong=True)
    chosen = stride.choose()
    rates = [expected(s, stride.gamma) / (s * guess + search) for s in range(1, MOST + 1)]
    assert rates[chosen - 1] == max(rates)


def test_old_verifications_are_forgotten() -> None:
    stride = KnnStride()
    for _ in range(20):
        stride.verified(0, wrong=True)
    assert stride.gamma == pytest.approx(0.1)
    for _ in range(20):
        stride.verified(8, wrong=False)
    assert stride.gamma == pytest.approx(65 / 66)
