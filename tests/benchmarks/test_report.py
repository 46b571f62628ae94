from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.benchmarks.report import MIN_PAIRS, Figure, Verdict, paired_ratio

speeds = st.lists(st.floats(1.0, 1000.0), min_size=MIN_PAIRS, max_size=20)


@given(speeds, st.floats(0.1, 10.0))
def test_constant_ratio_has_a_closed_interval(baseline: list[float], factor: float) -> None:
    ratio = paired_ratio([factor * value for value in baseline], baseline)
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((factor, factor, factor))
    assert ratio.pairs == len(baseline)


@pytest.mark.parametrize(
    ("value", "at_most", "verdict"),
    [
        (None, True, "not measured"),
        (1.0, True, "aim met"),
        (1.5, True, "met"),
        (2.5, True, "missed"),
        (2.5, False, "aim met"),
        (2.0, False, "met"),
        (0.5, False, "missed"),
    ],
)
def test_bounds_are_inclusive_and_have_a_side(value: float | None, at_most: bool, verdict: Verdict) -> None:
    required, aim = (2.0, 1.0) if at_most else (1.0, 2.5)
    assert Figure("f", value, "us", required, aim, at_most).verdict == verdict
