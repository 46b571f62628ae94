"""What a client tells the drafter inside an engine."""

from __future__ import annotations

import math

import pytest

from agentspec.backends.engine_plugin.request_state import (
    LATENCY,
    MOST_PREDICTED,
    PREDICTION,
    RequestInfo,
    RequestState,
    prediction_in,
    seconds_per_token_in,
)


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        *((given, ()) for given in (None, "text", [1, "2"], [1, True], [1, -1], [2**31 - 1], [1.0], {"a": 1})),
        ([0, 5, 2**31 - 2], (0, 5, 2**31 - 2)),
        ([7] * 100_000, (7,) * MOST_PREDICTED),  # the engine's thread takes it in
    ],
    ids=lambda given: str(given)[:20],
)
def test_a_prediction_is_a_list_of_tokens_whose_beginning_is_followed(given: object, tokens: tuple[int, ...]) -> None:
    assert prediction_in({PREDICTION: given}) == tokens and prediction_in({}) == ()


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        *((given, None) for given in (None, "20", True, 0, -1.0, math.nan, math.inf, 10**400, [20])),
        *((given, 0.02) for given in (20, 20.0)),
    ],
    ids=lambda given: str(given)[:20],
)
def test_what_is_no_time_is_no_latency_goal(given: object, seconds: float | None) -> None:
    assert seconds_per_token_in({LATENCY: given}) == seconds and seconds_per_token_in({}) is None


@pytest.mark.parametrize("given", [5e-324, 1e-200, 1e-3])
def test_a_goal_that_no_server_keeps_can_be_computed_with(given: float) -> None:
    seconds = seconds_per_token_in({LATENCY: given})
    assert seconds is not None
    state = RequestState(1, RequestInfo(seconds_per_token=seconds))
    state.output_length = 10
    assert 1 < state.required_tokens(now=1e6, step_seconds=0.01) < math.inf
