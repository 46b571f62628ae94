from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from agentspec.cache.settings import CacheSettings, without_password
from agentspec.errors import ConfigurationError


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("30d", 2592000), ("12 h", 43200), ("90m", 5400), ("1.5w", 907200), ("45s", 45), ("45", 45), (7, 7), (None, None)],
)
def test_retention_is_a_time_span(written: object, seconds: float | None) -> None:
    assert CacheSettings(retention=written).retention == seconds  # type: ignore[arg-type]


@pytest.mark.parametrize("written", ["a month", "30x", "-1d", -1, "d", "1d2h", "nan"])
def test_what_is_no_time_span(written: object) -> None:
    with pytest.raises(ValidationError, match="retention"):
        CacheSettings(retention=written)  # type: ignore[arg-type]


def test_patterns_are_regular_expressions() -> None:
    assert CacheSettings(refuse_patterns=("sk-[a-z]+",)).refuse_patterns == ("sk-[a-z]+",)
    with pytest.raises(ValidationError, match=r"'\(open' is no regular expression: missing"):
        CacheSettings(refuse_patterns=("fine", "(open"))


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("~/cache", Path.home() / "cache"),
        (Path("/a/b"), Path("/a/b")),
        ("postgresql://me@host:5432/db?sslmode=require", "postgresql://me@host:5432/db?sslmode=require"),
        (None, None),
    ],
)
def test_a_path_is_a_folder_or_an_address(written: object, path: object) -> None:
    settings = CacheSettings(path=written)  # type: ignore[arg-type]
    assert settings.path == settings.location() == path


@pytest.mark.parametrize("written", [5, "mysql://host/db", "postgresql://me@host/db?password=hunter2"])
def test_what_is_neither(written: object) -> None:
    with pytest.raises(ValidationError, match="path"):
        CacheSettings(path=written)  # type: ignore[arg-type]


def test_the_password_stands_beside_the_address(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("p@ss:/word\n")
    settings = CacheSettings(path="postgresql://me@host:5432/me@home", password_file=tmp_path / "secret")
    assert settings.location() == "postgresql://me:p%40ss%3A%2Fword@host:5432/me@home"
    assert "word@" not in repr(settings)
    assert without_password("postgresql://me:p%40ss@host/db") == "postgresql://me:**********@host/db"
    assert without_password("/a:b@c/d") == "/a:b@c/d"


def test_a_password_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("p")
    with pytest.raises(ConfigurationError, match="user@host"):
        CacheSettings(path=tmp_path, password_file=tmp_path / "secret").location()
    with pytest.raises(ConfigurationError, match="password_file"):
        CacheSettings(path="postgresql://me@host/db", password_file=tmp_path / "none").location()
