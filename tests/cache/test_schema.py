from __future__ import annotations

import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest

from agentspec.cache.schema import VERSION, open_database
from agentspec.errors import CacheFormatError


def execute(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(statement)
        connection.commit()


def test_a_new_database_is_private_and_shrinks(tmp_path: Path) -> None:
    path = tmp_path / "db"
    open_database(path).dispose()
    open_database(path).dispose()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_what_a_database_lacks_is_added(tmp_path: Path) -> None:
    open_database(tmp_path / "db").dispose()
    execute(tmp_path / "db", "DROP TABLE deletions")
    open_database(tmp_path / "db").dispose()
    with closing(sqlite3.connect(tmp_path / "db")) as connection:
        assert connection.execute("SELECT count(*) FROM deletions").fetchone() == (0,)


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    open_database(tmp_path / "db").dispose()
    execute(tmp_path / "db", f"UPDATE agentspec_meta SET value = '{VERSION + 1}'")
    with pytest.raises(CacheFormatError, match="newer"):
        open_database(tmp_path / "db")


@pytest.mark.parametrize("statement", ["DELETE FROM agentspec_meta", "UPDATE agentspec_meta SET value = 'x'"])
def test_a_database_without_a_version_is_damaged(tmp_path: Path, statement: str) -> None:
    open_database(tmp_path / "db").dispose()
    execute(tmp_path / "db", statement)
    with pytest.raises(CacheFormatError, match="damaged"):
        open_database(tmp_path / "db")


def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "db").write_bytes(b"my novel, chapter one: it was a dark and stormy night")
    with pytest.raises(CacheFormatError, match="not a database"):
        open_database(tmp_path / "db")
    assert (tmp_path / "db").read_bytes().startswith(b"my novel")


def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    execute(tmp_path / "db", "CREATE TABLE songs (title)")
    with pytest.raises(CacheFormatError, match="another program"):
        open_database(tmp_path / "db")


def test_damage_is_told(tmp_path: Path) -> None:
    open_database(tmp_path / "db").dispose()
    content = bytearray((tmp_path / "db").read_bytes())
    content[100:] = b"\x5a" * (len(content) - 100)
    (tmp_path / "db").write_bytes(content)
    with pytest.raises(CacheFormatError, match="damaged"):
        open_database(tmp_path / "db")
