"""How files of keys are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentspec.backends.settings import read_secret, sendable
from agentspec.errors import ConfigurationError


def test_a_key_file_of_another_editor(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"\xef\xbb\xbfsk-1\r\n")
    assert sendable(read_secret(tmp_path / "key"), "api_key") == "sk-1"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes("sk-1".encode("utf-16"))
    for path, reason in ((tmp_path / "key", "not UTF-8"), ("~no-such-user/key", "home"), ("a\0b", "null")):
        with pytest.raises(ConfigurationError, match=f"cannot read the key file .*{reason}"):
            read_secret(path)


@pytest.mark.parametrize(
    ("key", "says"),
    [("", "is empty: leave it out"), *((key, "must be a single line") for key in ("sk-1\nsk-2", "sk-…", "sk\t1"))],
)
def test_keys_that_no_header_can_hold(key: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=f"api_key {says}") as refused:
        sendable(key, "api_key")
    assert not key or key not in refused.value.message
