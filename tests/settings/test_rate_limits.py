"""Limits of keys in the configuration: whose they are, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentspec.errors import ConfigurationError
from agentspec.settings.load import load_settings
from agentspec.settings.server import ApiKey, RateLimits, read_keys

KEYS = """
[[server.api_keys]]
tenant = "a"
key_env = "A"
requests_per_minute = 5
[[server.api_keys]]
tenant = "b"
key_env = "B"
[[server.api_keys]]
role = "operator"
key_env = "METRICS"
"""


def settings(folder: Path, text: str) -> dict[tuple[str, str], RateLimits]:
    file = folder / "agentspec.toml"
    file.write_text(text)
    return load_settings(file).server.limits_of_keys


def test_a_key_has_its_own_limits(tmp_path: Path) -> None:
    assert settings(tmp_path, KEYS) == {("a", "A"): RateLimits(requests_per_minute=5)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (KEYS.replace("= 5", "= 0"), "requests_per_minute.*0"),
        (KEYS.replace("requests_per", "request_per"), "did you mean 'requests_per_minute'"),
        (KEYS + "tokens_per_minute = 5\n", "an operator's key uses no models"),
    ],
)
def test_limits_that_cannot_work_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        settings(tmp_path, text)


def test_entries_with_the_same_key_and_other_limits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A", "canary")
    monkeypatch.setenv("B", "canary")
    with pytest.raises(ConfigurationError, match="leave one of them out") as caught:
        read_keys([ApiKey(key_env="A", tokens_per_minute=5), ApiKey(key_env="B")])
    assert "canary" not in str(caught.value)
