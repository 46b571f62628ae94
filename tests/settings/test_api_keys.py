from __future__ import annotations

import pytest
from pydantic import SecretStr

from agentspec.errors import ConfigurationError
from agentspec.settings.server import ApiKey, read_keys


def test_api_keys_come_from_variables_and_files(tmp_path, monkeypatch):
    monkeypatch.setenv("KEY", " abc\n")
    file = tmp_path / "key"
    file.write_text("def\n")
    assert ApiKey(key_env="KEY").secret() == SecretStr("abc")
    assert ApiKey(key_file=file).secret() == SecretStr("def")


def test_a_missing_api_key_is_an_error(tmp_path):
    with pytest.raises(ConfigurationError, match="'ABSENT'"):
        ApiKey(key_env="ABSENT").secret()
    with pytest.raises(ConfigurationError, match="cannot read the key file"):
        ApiKey(key_file=tmp_path / "absent").secret()
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigurationError, match="is empty"):
        ApiKey(key_file=tmp_path / "empty").secret()


def test_a_key_that_no_client_can_send(tmp_path):
    (tmp_path / "two").write_text("abc\ndef\n")
    with pytest.raises(ConfigurationError, match="a single line") as refused:
        ApiKey(key_file=tmp_path / "two").secret()
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
