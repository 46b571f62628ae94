from __future__ import annotations

from typing import Any

import pytest

from agentspec.errors import InvalidRequestError
from agentspec.recordings.calls import RecordedCall
from agentspec.recordings.redaction import REDACTED, Redaction
from agentspec.types import Labels


@pytest.mark.parametrize(
    "text",
    [
        "MY_API_KEY={}",
        "GITHUB_TOKEN_2={}",
        "my-api-key: '{}'",
        'x1_secret_key_old = "{}"',
        "Authorization: Bearer {}",
    ],
)
def test_values_of_secret_names_are_redacted(text: str) -> None:
    assert Redaction().text(text.format("abcdefgh12345678")) == text.format(REDACTED)


@pytest.mark.parametrize("run", ["1", "0123456789abcdef", "0123-4567-", "a-", "token_", "KEY_", "sk-a-"])
def test_long_runs_without_spaces_take_time_by_their_length(run: str) -> None:
    """By the square of it they would take hours, which is how this test would fail."""
    text = "x" + run * (200_000 // len(run))
    assert len(Redaction().text(text)) <= len(text)


def test_a_call_that_is_nested_too_deeply_is_refused() -> None:
    nested: list[Any] = []
    for _ in range(2000):
        nested = [nested]
    messages = [{"role": "user", "content": nested}]
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        Redaction().call(RecordedCall("f:1", Labels(), messages, {"role": "assistant", "content": "a"}))
