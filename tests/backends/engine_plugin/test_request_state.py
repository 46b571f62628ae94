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
    labels_in,
    prediction_in,
    seconds_per_token_in,
)
from agentspec.speculation.governor import RequestStats
from agentspec.types import Labels


def test_labels() -> None:
    assert labels_in({"agentspec_session": "s", "agentspec_workflow": 3, "agentspec_step": "plan", "session": "x"}) == (
        Labels("s", None, "plan")
    )


@pytest.mark.parametrize("given", [None, "text", [1, "2"], [1, True], [1, -1], [2**31 - 1], [1.0], {"a": 1}])
def test_what_cannot_be_tokens_is_no_prediction(given: object) -> None:
    assert prediction_in({PREDICTION: given}) == ()
    assert prediction_in({}) == ()


def test_a_prediction() -> None:
    assert prediction_in({PREDICTION: [0, 5, 2**31 - 2]}) == (0, 5, 2**31 - 2)


def test_of_a_long_prediction_the_beginning_is_followed() -> None:
    """The engine's thread takes it in."""
    assert prediction_in({PREDICTION: [7] * 100_000}) == (7,) * MOST_PREDICTED


@pytest.mark.parametrize(
    "given", [None, "20", True, 0, -1.0, math.nan, math.inf, pytest.param(10**400, id="huge"), [20]]
)
def test_what_is_no_time_is_no_latency_goal(given: object) -> None:
    assert seconds_per_token_in({LATENCY: given}) is None
    assert seconds_per_token_in({}) is None


@pytest.mark.parametrize("given", [5e-324, 1e-200, 1e-3])
def test_a_goal_that_no_server_keeps_can_be_computed_with(given: float) -> None:
    seconds = seconds_per_token_in({LATENCY: given})
    assert seconds is not None
    state = RequestState(1, RequestStats(), RequestInfo(seconds_per_token=seconds))
    state.output_length = 10
    assert 1 < state.required_tokens(now=1e6, step_seconds=0.01) < math.inf


def test_a_latency_goal() -> None:
    assert seconds_per_token_in({LATENCY: 20}) == seconds_per_token_in({LATENCY: 20.0}) == 0.02
