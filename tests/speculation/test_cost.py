"""The learned cost of a forward by its number of tokens."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from agentspec.speculation.cost import CostCurve

SIZES = np.arange(1, 1000)
forwards = st.tuples(st.integers(1, 30) | st.integers(1, 700), st.floats(-12, 3).map(math.exp))


def check(curve: CostCurve) -> None:
    costs = curve.many(SIZES)
    assert np.isfinite(costs).all() and (costs > 0).all()
    assert (np.diff(costs) >= -1e-9 * costs[1:]).all()


@example([(4, 1.0), (14, 1.0)], [(18, 8.0), (4, 4.0), (15, 8.0), (15, 1.0)])  # the mean that a line explained falls
@example([(18, 1.0)], [(4, 2.0), (22, 4.0), (27, 2.0), (4, 4.0), (23, 4.0)])  # the line was only assumed
@given(st.lists(forwards, min_size=1, max_size=4), st.lists(forwards, max_size=80))
def test_any_measurements_give_a_rising_positive_curve(
    calibrated: list[tuple[int, float]], seen: list[tuple[int, float]]
) -> None:
    curve = CostCurve(calibrated)
    for tokens, seconds in seen:
        curve.observe(tokens, seconds)
    check(curve)
