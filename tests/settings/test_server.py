from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from agentspec.errors import ConfigurationError
from agentspec.settings.load import load_settings
from agentspec.settings.server import ServerSettings

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
