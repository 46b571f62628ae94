"""The stride of speculative retrieval: the paper's formula, and that it never costs what it cannot bring back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.speculation.stride import (
    LONGEST_PAUSE,
    MOST,
    SEQUENTIAL,
    StrideGovernor,
    StridePlan,
    asynchronous_seconds,
    one_by_one,
    os3,
    synchronous_seconds,
)


@pytest.mark.parametrize(
    ("generation", "retrieval", "gamma", "want"),
    [(1, 40, 0.6, 6), (1, 1, 0.6, 2), (1, 5, 0.6, 3), (1, 5, 0.3, 2), (1, 0.2, 0.6, 1), (1, 40, 0.9, MOST)],
)
def test_the_optimal_stride_is_that_of_the_paper(generation: float, retrieval: float, gamma: float, want: int) -> None:
    assert os3(generation, retrieval, gamma) == want


times = st.floats(1e-3, 10)


@given(times, times, st.floats(0, 1))
def test_nothing_is_faster_than_searches_that_take_no_time(generation: float, retrieval: float, gamma: float) -> None:
    best = generation + (1 - gamma) * retrieval
    assert asynchronous_seconds(generation, retrieval, gamma) >= best * (1 - 1e-9)
    assert all(synchronous_seconds(s, generation, retrieval, gamma) >= generation * (1 - 1e-9) for s in (1, 2, 5, MOST))


@given(times, times, st.floats(0, 1))
def test_one_guess_that_is_waited_for_never_pays(generation: float, retrieval: float, gamma: float) -> None:
    assert synchronous_seconds(1, generation, retrieval, gamma) >= one_by_one(generation, retrieval)


def governor(generation: float, retrieval: float, *, asynchronous: bool = True) -> StrideGovernor:
    made = StrideGovernor(asynchronous=asynchronous)
    made.measured.generated(generation, changed=False, alone=True)
    made.measured.retrieved(retrieval, alone=True)
    return made


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_fast_knowledge_base_is_asked_round_after_round(asynchronous: bool) -> None:
    made = governor(1.0, 0.01, asynchronous=asynchronous)
    made.verified(9, wrong=True)
    assert made.choose() == SEQUENTIAL


def test_a_slow_one_is_guessed_ahead_of() -> None:
    assert governor(1.0, 4.0).choose() == StridePlan(1, True)
    waited = governor(1.0, 8.0, asynchronous=False)
    waited.verified(3, wrong=True)
    assert waited.choose() == StridePlan(os3(1.0, 8.0, 0.6))


def test_wrong_guesses_end_the_guessing_and_right_ones_bring_it_back() -> None:
    made = governor(1.0, 1.5)
    for _ in range(30):
        made.verified(0, wrong=True)
    assert made.choose() == SEQUENTIAL
    for _ in range(30):
        made.verified(1, wrong=False)
    assert made.choose().stride


@pytest.mark.parametrize("seconds", [4.9, 6.0])
def test_what_brings_next_to_nothing_is_tried_ever_less_often(seconds: float) -> None:
    """Rounds that take about as long as sequential retrieval's would have, or longer: whatever the formulas promise."""
    made = governor(1.0, 4.0)
    tried = 0
    for _ in range(2000):
        if made.choose().stride:
            tried += 1
            made.measured.kept(False, seconds)
    assert made.measured.pause == LONGEST_PAUSE and tried < 60
