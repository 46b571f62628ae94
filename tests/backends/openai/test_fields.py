"""What upstreams are told of sessions and priorities; the sign of a priority is a property of the server."""

from __future__ import annotations

from typing import Any

import pytest

from agentspec.backends.openai.fields import priority_fields
from agentspec.backends.settings import OpenAISettings
from agentspec.errors import InvalidRequestError


def settings(**given: Any) -> OpenAISettings:
    return OpenAISettings(base_url="http://x/v1", **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "given", "sent"),
    [
        ("vllm", {"priority": "auto"}, {"priority": 3}),
        ("sglang", {"priority": "auto"}, {"priority": -3}),
        ("sglang", {"priority": "lowest_first"}, {"priority": 3}),
        ("other", {"priority": "highest_first"}, {"priority": -3}),
        ("vllm", {"priority": "off"}, {}),
    ],
)
def test_a_priority_goes_on_the_servers_scale(kind: Any, given: dict[str, Any], sent: dict[str, Any]) -> None:
    assert priority_fields(settings(**given), kind, {"priority": 3}) == sent
    assert priority_fields(settings(**given), kind, {}) == {}


@pytest.mark.parametrize("value", [-1, 1.5, True, "1", 2**31])
def test_no_request_may_push_ahead(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="priority"):
        priority_fields(settings(priority="auto"), "vllm", {"priority": value})


def test_an_unknown_scale_is_not_guessed() -> None:
    for kind in ("other", None):
        with pytest.raises(InvalidRequestError):
            priority_fields(settings(priority="auto"), kind, {"priority": 1})  # type: ignore[arg-type]
