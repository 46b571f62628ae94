"""Which drafters the settings mean."""

from __future__ import annotations

from typing import Any

import pytest

from agentspec.backends.settings import TorchSettings


@pytest.mark.parametrize(
    ("given", "cache", "want"),
    [
        ({}, True, ("suffix", "prediction")),
        ({}, False, ("ngram", "prediction")),
        ({"draft_model": "m"}, True, ("suffix", "prediction", "model")),
    ],
)
def test_what_is_of_use_drafts(given: dict[str, Any], cache: bool, want: tuple[str, ...]) -> None:
    assert TorchSettings(**given).drafter_names(cache=cache) == want
