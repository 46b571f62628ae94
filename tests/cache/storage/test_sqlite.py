from __future__ import annotations

import errno
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import event, exc
from typer.testing import CliRunner

from agentspec.cache import SuffixCache
from agentspec.cache.storage.opening import prepare
from agentspec.cache.storage.sqlite import DATABASE, SqliteDatabase
from agentspec.cache.stored import StoredResponse
from agentspec.cli import app
from agentspec.errors import (
    CacheClosedError,
    CacheError,
    CacheFormatError,
    CacheLockedError,
    CacheUnavailableError,
    ConfigurationError,
)


def made(folder: Path) -> SqliteDatabase:
    database = SqliteDatabase(folder)
    database.connect()
    prepare(database)
    return database


def test_a_new_database_is_private_and_shrinks(tmp_path: Path) -> None:
    for _ in range(2):
        made(tmp_path / "cache").close()
    path = tmp_path / "cache" / DATABASE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    database = made(path.parent)
    with database.engine.connect() as opened:  # a savepoint's journal, with the rows in it, goes to no other folder
        assert opened.exec_driver_sql("PRAGMA temp_store").scalar() == 2
    database.close()


def record(cache: SuffixCache, *outputs: int) -> None:
    for output in outputs:
        with cache.request([1, 2], session="s") as request:
            request.extend([output, output + 1])


def test_a_second_use_of_the_folder_in_the_process_leaves_the_first_its_locks(tmp_path: Path) -> None:
    """To close a file drops every lock of the process on it: the next process that closed the database would take
    itself for the last, and delete the write-ahead log under the first.
    """
    look = (
        "import sqlite3, sys; database = sqlite3.connect(sys.argv[1])\n"
        "print(database.execute('SELECT count(*) FROM sequences').fetchone()); database.close()"
    )
    seen = []
    with SuffixCache.open(tmp_path) as cache:
        for turn in range(3):
            SuffixCache.open(tmp_path, mode="follower").close()
            for command in ("stats", "verify"):
                assert CliRunner().invoke(app, ["cache", command, "--path", str(tmp_path)]).exit_code == 0
            assert cache.responses.put(StoredResponse(str(turn), "a", time.time()))
            record(cache, turn)
            cache.flush()
            done = subprocess.run(
                [sys.executable, "-c", look, str(tmp_path / DATABASE)], capture_output=True, text=True, check=True
            )
            seen.append(done.stdout.strip())
        assert seen == ["(1,)", "(2,)", "(3,)"]
        assert (tmp_path / (DATABASE + "-wal")).exists()


@pytest.mark.parametrize("how", ["deleted", "replaced", "link"])
def test_a_database_that_is_replaced_while_open_is_neither_written_nor_forgotten_in(tmp_path: Path, how: str) -> None:
    first, second, link = tmp_path / "first", tmp_path / "second", tmp_path / "link"
    with SuffixCache.open(second) as other:
        record(other, 7)
    first.mkdir()
    link.symlink_to(first)
    with SuffixCache.open(link) as cache:
        record(cache, 1)
        cache.flush()
        if how == "link":
            link.unlink()
            link.symlink_to(second)
        else:
            for file in first.glob(f"{DATABASE}*"):
                file.unlink()
        if how == "replaced":
            shutil.copy(second / DATABASE, first)
        record(cache, 2)
        for use in (cache.flush, lambda: cache.forget(session="s"), cache._sync.follow):  # type: ignore[union-attr]
            with pytest.raises(CacheError, match="deleted or replaced while it was open"):
                use()
        assert cache.stats().mode == "follower" and "replaced" in str(cache.stats().store_error)
        with SuffixCache.open(link, mode="writer") as fresh:
            assert fresh.stats().sequences == (0 if how == "deleted" else 1)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EMFILE])
def test_a_folder_that_cannot_be_locked_is_unavailable(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", fails)
    with pytest.raises(CacheUnavailableError, match=re.escape(os.strerror(code))):
        SuffixCache.open(tmp_path, mode="writer")
    with SuffixCache.open(tmp_path) as cache:
        assert os.strerror(code) in str(cache.stats().store_error) and cache.path is None
    assert "in memory only" in caplog.text


def test_nobody_waits_for_a_writer_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.cache.storage.sqlite._TIMEOUT", 0)
    first, second = SqliteDatabase(tmp_path), SqliteDatabase(tmp_path)
    first.connect()
    prepare(first)
    with first.writing(), second.engine.connect() as connection, first.engine.connect() as other:
        for one in (connection, other):
            assert one.exec_driver_sql("SELECT count(*) FROM sequences").scalar() == 0
    first.close()
    second.close()


def test_what_is_no_database_is_left_whole_under_another_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    novel = b"my novel, chapter one: it was a dark and stormy night"
    (tmp_path / DATABASE).write_bytes(novel)
    with pytest.raises(CacheFormatError, match="not a database"):
        SuffixCache.open(tmp_path, mode="follower")
    with SuffixCache.open(tmp_path) as cache:
        record(cache, 1)
        cache.flush()
    [aside] = tmp_path.glob(f"{DATABASE}.damaged-*")
    assert aside.read_bytes() == novel and str(aside) in caplog.text


@pytest.mark.slow
def test_a_reader_is_in_the_way_of_shrinking_and_nothing_else(tmp_path: Path) -> None:
    database = made(tmp_path)
    database.engine.dispose()
    with closing(sqlite3.connect(tmp_path / DATABASE)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM processes").fetchall()
        with database.writing() as connection:
            connection.exec_driver_sql("PRAGMA busy_timeout = 10")
            connection.exec_driver_sql("INSERT INTO processes DEFAULT VALUES")
        assert not database.shrink()
        assert not database.secure_erase(rewrite=True)
    assert database.shrink()
    assert database.secure_erase(rewrite=True)
    database.close()


@pytest.mark.parametrize(
    ("code", "is_transient"),
    [
        (sqlite3.SQLITE_FULL, True),
        (sqlite3.SQLITE_BUSY, True),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, True),
        (sqlite3.SQLITE_IOERR_WRITE, True),
        (sqlite3.SQLITE_IOERR_FSYNC, False),
        (sqlite3.SQLITE_IOERR_READ, False),
        (sqlite3.SQLITE_IOERR, False),
        (sqlite3.SQLITE_CORRUPT, False),
        (sqlite3.SQLITE_READONLY, False),
        (sqlite3.SQLITE_CONSTRAINT_TRIGGER, False),
    ],
)
def test_which_failures_pass(tmp_path: Path, code: int, is_transient: bool) -> None:
    database = SqliteDatabase(tmp_path)
    error = sqlite3.OperationalError("...")
    error.sqlite_errorcode = code  # type: ignore[misc]
    assert database.is_transient(exc.OperationalError("INSERT", {}, error)) is is_transient
    assert not database.is_transient(ValueError())
    database.close()


def test_the_holder_is_named_and_release_frees(tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path, mode="writer"), pytest.raises(CacheLockedError, match=f"process {os.getpid()}"):
        SuffixCache.open(tmp_path, mode="writer")
    SuffixCache.open(tmp_path, mode="writer").close()


class RacingConnection(sqlite3.Connection):
    """Loses the race for the file's lock three times. SQLite then fails at once, whatever the timeout."""

    lost = 0

    def cursor(self, *arguments: object) -> sqlite3.Cursor:  # type: ignore[override]
        return super().cursor(RacingCursor)


class RacingCursor(sqlite3.Cursor):
    def execute(self, statement: str, *parameters: object) -> sqlite3.Cursor:  # type: ignore[override]
        if "journal_mode =" in statement and RacingConnection.lost < 3:
            RacingConnection.lost += 1
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise error
        return super().execute(statement, *parameters)  # type: ignore[arg-type]


def test_processes_that_make_the_database_at_the_same_moment_wait_for_each_other(tmp_path: Path) -> None:
    database = SqliteDatabase(tmp_path)
    database.connect()
    event.listen(database.engine, "do_connect", _raced)
    with database.engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    assert RacingConnection.lost == 3
    database.close()


def _raced(dialect: object, record: object, arguments: list[object], keywords: dict[str, object]) -> None:
    keywords["factory"] = RacingConnection


@pytest.mark.parametrize("name", [DATABASE, DATABASE + "-wal", "writer.lock"])
def test_links_are_not_followed(tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"")
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / name).symlink_to(target)
    with pytest.raises((ConfigurationError, CacheUnavailableError), match=r"symbolic link|cannot be opened"):
        SuffixCache.open(folder, mode="writer").close()
    assert target.read_bytes() == b""


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / DATABASE)
    with pytest.raises(ConfigurationError, match="no file"):
        SuffixCache.open(tmp_path)


@pytest.mark.parametrize("path", ["", "  ", "a\0b", 5, b"bytes", ["x"], "~nobody-of-that-name/x"])
def test_what_is_no_path_is_refused(path: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"path|cannot be opened"):
        SuffixCache.open(path)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_closed_database_makes_no_connection_anew(tmp_path: Path) -> None:
    """A thread that still stores an answer at the end would hold the files of a cache that is closed, and write."""
    cache = SuffixCache.open(tmp_path)
    answer = StoredResponse("r", "a", time.time())
    assert cache.responses.put(answer)
    cache.close()
    for use in (lambda: cache.responses.put(answer), lambda: cache.responses.get("a", "r")):
        with pytest.raises(CacheClosedError, match="this cache is closed"):
            use()
    assert not list(tmp_path.glob("*-wal"))
