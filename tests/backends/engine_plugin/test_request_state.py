"""What a client tells the drafter inside an engine."""

from __future__ import annotations

import pytest

from agentspec.backends.engine_plugin.request_state import (
    MOST_PREDICTED,
    PREDICTION,
    prediction_in,
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
