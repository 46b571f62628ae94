"""Which drafters the settings mean, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from agentspec.backends.settings import TorchSettings


@pytest.mark.parametrize(
    ("given", "cache", "want"),
    [
        ({}, True, ("suffix", "prediction")),
        ({}, False, ("ngram", "prediction")),
        ({"draft_model": "m"}, True, ("suffix", "prediction", "model")),
        ({"drafters": ["ngram"]}, True, ("ngram",)),
        ({"drafters": []}, True, ()),
        ({"drafters": ["model", "suffix"], "draft_model": "m"}, False, ("model", "suffix")),
    ],
)
def test_unset_takes_what_is_of_use(given: dict[str, Any], cache: bool, want: tuple[str, ...]) -> None:
    assert TorchSettings(**given).drafter_names(cache=cache) == want


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"drafters": ["model"]}, "set draft_model"),
        ({"drafters": ["suffix"], "draft_model": "m"}, "add it, or unset draft_model"),
        ({"drafters": ["suffix", "suffix"]}, "twice"),
        ({"drafters": ["eagle"]}, "'suffix', 'prediction', 'ngram' or 'model'"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TorchSettings(**given)
