"""The stride of speculative retrieval: the paper's formula, and that it never costs what it cannot bring back."""

from __future__ import annotations

import pytest

from agentspec.speculation.stride import LONGEST_PAUSE, MOST, StrideGovernor, os3


@pytest.mark.parametrize(
    ("generation", "retrieval", "gamma", "want"),
    [(1, 40, 0.6, 6), (1, 1, 0.6, 2), (1, 5, 0.6, 3), (1, 5, 0.3, 2), (1, 0.2, 0.6, 1), (1, 40, 0.9, MOST)],
)
def test_the_optimal_stride_is_that_of_the_paper(generation: float, retrieval: float, gamma: float, want: int) -> None:
    assert os3(generation, retrieval, gamma) == want


def governor(generation: float, retrieval: float) -> StrideGovernor:
    made = StrideGovernor()
    made.measured.generated(generation, changed=False, alone=True)
    made.measured.retrieved(retrieval, alone=True)
    return made


def test_only_a_slow_knowledge_base_is_guessed() -> None:
    fast = governor(1.0, 0.01)
    fast.verified(9, wrong=True)
    assert fast.choose() == 0 and governor(1.0, 4.0).choose() == 1


def test_wrong_guesses_end_the_guessing_and_right_ones_bring_it_back() -> None:
    made = governor(1.0, 1.5)
    for _ in range(30):
        made.verified(0, wrong=True)
    assert made.choose() == 0
    for _ in range(30):
        made.verified(1, wrong=False)
    assert made.choose() == 1


@pytest.mark.parametrize("seconds", [4.9, 6.0])
def test_speculation_that_gains_nothing_is_tried_ever_less_often(seconds: float) -> None:
    """Rounds that take about as long as sequential retrieval's would have, or longer: whatever the formulas promise."""
    made = governor(1.0, 4.0)
    tried = 0
    for _ in range(2000):
        if made.choose():
            tried += 1
            made.measured.kept(False, seconds)
    assert made.measured.pause == LONGEST_PAUSE and tried < 60
