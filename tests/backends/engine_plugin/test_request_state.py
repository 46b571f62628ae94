"""What a client tells the drafter inside an engine."""

from __future__ import annotations

import pytest

from agentspec.backends.engine_plugin.request_state import PREDICTION, labels_in, prediction_in
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
