"""How many tokens a step must add for a latency goal to be kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.speculation.latency_goal import LatencyGoal


@given(
    st.floats(1e-3, 10.0), st.floats(0.0, 1e6), st.lists(st.tuples(st.floats(1e-3, 5.0), st.integers(1, 9)), max_size=9)
)
def test_who_adds_what_is_required_is_on_time_after_each_step(
    pace: float, start: float, steps: list[tuple[float, int]]
) -> None:
    goal, now, tokens = LatencyGoal(pace), start, 1
    goal.begin(start)
    for seconds, gained in steps:
        required = goal.required_tokens(tokens, now, seconds)
        due = 1 + (now + seconds - start) / pace
        assert tokens + required == pytest.approx(due, rel=1e-6)
        tokens, now = tokens + gained, now + seconds


def test_nothing_is_required_before_the_first_token() -> None:
    goal = LatencyGoal(0.1)
    assert goal.required_tokens(0, 100.0, 5.0) == 0.0
    goal.begin(100.0)
    goal.begin(101.0)  # the first counts
    assert goal.required_tokens(1, 102.0, 1.0) == pytest.approx(30.0)
