"""The learned cost of a forward by its number of tokens."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from agentspec.speculation.cost import CostCurve, CostModel, Floats

SIZES = np.arange(1, 1000)
forwards = st.tuples(st.integers(1, 30) | st.integers(1, 700), st.floats(-12, 3).map(math.exp))


def check(costs: Floats) -> None:
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
    check(curve.many(SIZES))


@given(st.lists(st.tuples(forwards, st.sampled_from([0, 1, 5000, 10**6]), st.integers(1, 30)), max_size=60))
def test_any_forwards_of_several_sequences_leave_costs_positive_and_rising(
    seen: list[tuple[tuple[int, float], int, int]],
) -> None:
    model = CostModel()
    for (tokens, seconds), context, batch in seen:
        model.observe(tokens * batch, context, seconds, batch)
    for context, batch in ((0, 1), (3000, 1), (10**6, 30)):
        check(model.many(SIZES, context, batch))
