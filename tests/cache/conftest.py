"""Fixtures of the cache's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentspec.cache.storage.database import Database
from agentspec.cache.storage.opening import prepare
from agentspec.cache.storage.sqlite import SqliteDatabase


@pytest.fixture(params=["sqlite", "postgres"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    """Where a new cache can be kept, in each kind of database."""
    return tmp_path / "cache" if request.param == "sqlite" else request.getfixturevalue("postgres")


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database | None]:
    """An open database with its tables, of each kind; None for a store in memory."""
    if request.param == "memory":
        yield None
        return
    opened: Database
    if request.param == "postgres":
        from agentspec.cache.storage.postgres import PostgresDatabase

        opened = PostgresDatabase(request.getfixturevalue("postgres"))
    else:
        opened = sqlite = SqliteDatabase(tmp_path)
        sqlite.connect()
    prepare(opened)
    yield opened
    opened.close()
