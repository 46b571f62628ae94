from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from agentspec.errors import ConfigurationError
from agentspec.settings.load import load_settings
from agentspec.settings.server import ApiKey, RateLimits, ServerSettings, read_keys

SECRET = "canary-" * 5


def test_the_secret_comes_from_a_variable_or_a_file_and_stays_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text(f" {SECRET}\n")
    assert ServerSettings(secret_file=tmp_path / "secret").read_secret() == SECRET.encode()
    monkeypatch.setenv("AGENTSPEC_SERVER__SECRET", SECRET)
    settings = load_settings()
    assert settings.server.read_secret() == SECRET.encode() and SECRET not in repr(settings)


def test_without_a_secret_there_is_a_new_one_each_time() -> None:
    found = {ServerSettings().read_secret() for _ in range(3)}
    assert len(found) == 3 and {len(secret) for secret in found} == {32}


def test_a_short_secret_and_one_in_the_configuration_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="32 characters"):
        ServerSettings(secret=SecretStr("short")).read_secret()
    file = tmp_path / "agentspec.toml"
    file.write_text(f'[server]\nsecret = "{SECRET}"\n')
    with pytest.raises(ConfigurationError, match="secret_file") as caught:
        load_settings(file)
    assert SECRET not in str(caught.value)


def test_api_keys_come_from_variables_and_files(tmp_path, monkeypatch):
    monkeypatch.setenv("KEY", " abc\n")
    for name, text in (("key", "def\n"), ("empty", "\n"), ("two", "abc\ndef\n")):
        (tmp_path / name).write_text(text)
    assert ApiKey(key_env="KEY").secret() == SecretStr("abc")
    assert ApiKey(key_file=tmp_path / "key").secret() == SecretStr("def")
    for key, said in (
        (ApiKey(key_env="ABSENT"), "'ABSENT'"),
        (ApiKey(key_file=tmp_path / "absent"), "cannot read the key file"),
        (ApiKey(key_file=tmp_path / "empty"), "is empty"),
        (ApiKey(key_file=tmp_path / "two"), "a single line"),
    ):
        with pytest.raises(ConfigurationError, match=said) as refused:
            key.secret()
        assert "abc" not in str(refused.value)


def test_a_key_has_one_tenant(tmp_path, monkeypatch):
    monkeypatch.setenv("KEY", "same")
    (tmp_path / "key").write_text("same\n")
    again = ApiKey(tenant="a", key_file=tmp_path / "key")
    first = ApiKey(tenant="a", key_env="KEY")
    assert [key.tenant for _, key in read_keys([first, again])] == ["a", "a"]
    with pytest.raises(ConfigurationError, match="'a' and 'b' have the same API key") as caught:
        read_keys([first, ApiKey(tenant="b", key_file=tmp_path / "key")])
    assert "same\n" not in str(caught.value) and "'same'" not in str(caught.value)


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
        (KEYS + "tokens_per_minute = 5\n", "an operator's key cannot use models"),
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
