"""A cache on disk from outside: who may open it, what becomes durable, what it refuses, and how much it takes."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from agentspec.cache import SuffixCache
from agentspec.cache.stored import StoredResponse
from agentspec.cli import app
from agentspec.errors import (
    CacheError,
    CacheFormatError,
    CacheLockedError,
    CacheUnavailableError,
    CacheVersionError,
    ConfigurationError,
)
from tests.cache.conftest import DATABASE, SQLITE_FIRST, execute, knows, outputs, record, text, wait
from tests.conftest import costly

BREAK = {
    "sqlite": ["CREATE TRIGGER broken BEFORE INSERT ON sequences BEGIN SELECT RAISE(ABORT, 'disk is gone'); END"],
    "postgres": [
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'disk is gone'; END $$",
        "CREATE TRIGGER broken BEFORE INSERT ON sequences FOR EACH ROW EXECUTE FUNCTION broken()",
    ],
}


def broken(location: str | Path) -> list[str]:
    return BREAK["postgres" if isinstance(location, str) else "sqlite"]


# Opening.


def test_folder_and_files_are_private_and_shrink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for _ in range(2):
        with SuffixCache.open("~/deep/cache") as cache:
            record(cache, [1, 2])
            cache.flush()
            assert cache.path == tmp_path / "deep" / "cache"
            assert stat.S_IMODE(cache.path.stat().st_mode) == 0o700
            assert {stat.S_IMODE(file.stat().st_mode) for file in cache.path.iterdir()} == {0o600}
    with closing(sqlite3.connect(tmp_path / "deep" / "cache" / DATABASE)) as connection:
        assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize("path", ["", "  ", "a\0b", 5, b"bytes", ["x"], "~nobody-of-that-name/x", "file"])
def test_what_is_no_path_is_refused(path: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError, match=r"path|cannot be opened|file"):
        SuffixCache.open(path)  # type: ignore[arg-type]
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", [DATABASE, DATABASE + "-wal", "writer.lock"])
def test_links_are_not_followed(tmp_path: Path, name: str) -> None:
    target, folder = tmp_path / "target", tmp_path / "cache"
    target.write_bytes(b"")
    folder.mkdir()
    (folder / name).symlink_to(target)
    with pytest.raises((ConfigurationError, CacheUnavailableError), match=r"symbolic link|cannot be opened"):
        SuffixCache.open(folder, mode="writer").close()
    assert target.read_bytes() == b""


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_only_a_file_is_a_database(tmp_path: Path, make: object) -> None:
    make(tmp_path / DATABASE)  # type: ignore[operator]
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="no file"):
            SuffixCache.open(tmp_path, mode="writer")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EMFILE])
def test_a_folder_that_cannot_be_locked_is_unavailable(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", fails)  # no file system of this machine lacks locks
    threads = threading.active_count()
    with pytest.raises(CacheUnavailableError, match=re.escape(os.strerror(code))):
        SuffixCache.open(tmp_path, mode="writer")
    assert threading.active_count() <= threads  # those of tests before may end meanwhile
    with SuffixCache.open(tmp_path) as cache:
        assert os.strerror(code) in str(cache.stats().store_error) and cache.path is None
    assert "in memory only" in caplog.text


def test_modes(location: str | Path) -> None:
    with SuffixCache.open(location, mode="follower") as follower:
        assert follower.stats().mode == "follower"
        with SuffixCache.open(location, mode="writer") as writer, SuffixCache.open(location) as second:
            assert (writer.stats().mode, second.stats().mode) == ("writer", "follower")
            with pytest.raises(CacheLockedError, match=f"process {os.getpid()}"):
                SuffixCache.open(location, mode="writer")
    with SuffixCache.open(location, mode="writer") as cache:
        assert cache.stats().mode == "writer"


def test_many_open_it_at_once(location: str | Path) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with SuffixCache.open(location) as cache:
                record(cache, [1, 2, 3])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and outputs(location) == 6 * [[1, 2, 3]]


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE agentspec_meta SET value = '999'", "of version 999.*move the database away"),
        ("UPDATE agentspec_meta SET value = '4'", "of version 4.*use the agentspec that"),
        ("DELETE FROM agentspec_meta", "damaged"),
        ("UPDATE agentspec_meta SET value = 'x'", "damaged"),
        ("DROP TABLE deletions", "move it away"),
        ("DROP TABLE agentspec_meta", "another program"),
    ],
)
def test_what_cannot_be_used_is_refused(location: str | Path, statement: str, said: str) -> None:
    """By everyone who opens it, and the writer's lock is free again."""
    SuffixCache.open(location).close()
    execute(location, statement)
    for _ in range(2):
        with pytest.raises(CacheFormatError, match=said) as caught:
            SuffixCache.open(location, mode="follower")
        assert isinstance(caught.value, CacheVersionError) == ("version" in said)
    if "damaged" in said or ("move it" in said and isinstance(location, Path)):
        return  # the next writer replaces it, see test_damage.py
    for _ in range(2):
        with pytest.raises(CacheFormatError, match=said):
            SuffixCache.open(location, mode="writer")


def test_another_programs_database_is_refused_and_left_alone(location: str | Path) -> None:
    if isinstance(location, Path):
        location.mkdir()
    execute(location, "CREATE TABLE songs (title VARCHAR)", "INSERT INTO songs VALUES ('x')")
    with pytest.raises(CacheFormatError, match="another program"):
        SuffixCache.open(location)
    assert execute(location, "SELECT * FROM songs") == [("x",)]


# What becomes durable.


def test_processes_see_what_others_add(location: str | Path) -> None:
    with SuffixCache.open(location) as writer, SuffixCache.open(location) as follower:
        for mine, others, base in ((writer, follower, 100), (follower, writer, 200)):
            record(mine, [base, base + 1, base + 2])
            mine.flush()
            wait(lambda others=others, base=base: others.stats().sequences == base // 100)
            assert knows(others, [base, base + 1], at=1)
        wait(lambda: follower.stats().unread == 0 and follower.stats().behind < 5)
        assert writer.stats().sequences == follower.stats().sequences == 2


def test_serving_goes_on_when_writing_fails(location: str | Path, caplog: pytest.LogCaptureFixture) -> None:
    with SuffixCache.open(location) as cache, caplog.at_level(logging.WARNING):
        execute(location, *broken(location))
        for turn in range(3):
            record(cache, [40 + turn, 50 + turn], [1])
            with pytest.raises(CacheError, match="disk is gone"):
                cache.flush()
        stats = cache.stats()
        assert stats.store_error is not None and "disk is gone" in stats.store_error
        assert stats.sequences == 3 and knows(cache, [41, 51], at=1)
    assert len(caplog.records) == 1


def test_closing_a_request_waits_for_no_other_process(tmp_path: Path) -> None:
    """Whichever process it is, and its first output too: another one may hold the database's lock for half a minute."""
    SuffixCache.open(tmp_path).close()
    with (
        SuffixCache.open(tmp_path, mode="follower") as cache,
        closing(sqlite3.connect(tmp_path / DATABASE, isolation_level=None)) as other,
    ):
        request = cache.request([1, 2])
        other.execute("BEGIN IMMEDIATE")
        request.extend([3, 4])
        request.close()
        assert outputs(tmp_path) == []
        other.execute("ROLLBACK")
        cache.flush()
        assert outputs(tmp_path) == [[3, 4]] and cache.stats().unwritten == 0


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
            assert cache.responses.put(StoredResponse(str(turn), "a", 1e9))
            record(cache, [turn, 2])
            cache.flush()
            command = [sys.executable, "-c", look, str(tmp_path / DATABASE)]
            seen.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        assert seen == ["(1,)", "(2,)", "(3,)"]
        assert (tmp_path / (DATABASE + "-wal")).exists()


@pytest.mark.parametrize("how", ["deleted", "replaced", "link"])
def test_a_database_that_is_replaced_while_open_is_neither_written_nor_forgotten_in(tmp_path: Path, how: str) -> None:
    first, second, link = tmp_path / "first", tmp_path / "second", tmp_path / "link"
    with SuffixCache.open(second) as other:
        record(other, [7, 8], session="s")
    first.mkdir()
    link.symlink_to(first)
    with SuffixCache.open(link) as cache:
        record(cache, [1, 2], session="s")
        cache.flush()
        if how == "link":
            link.unlink()
            link.symlink_to(second)
        else:
            for file in first.glob(f"{DATABASE}*"):
                file.unlink()
        if how == "replaced":
            shutil.copy(second / DATABASE, first)
        record(cache, [2, 3], session="s")
        for use in (cache.flush, lambda: cache.forget(session="s")):
            with pytest.raises(CacheError, match="deleted or replaced while it was open"):
                use()
        wait(lambda: cache.stats().mode == "follower")
        assert "replaced" in str(cache.stats().store_error)
        with SuffixCache.open(link, mode="writer") as fresh:
            assert fresh.stats().sequences == (0 if how == "deleted" else 1)


def test_a_lock_file_that_was_deleted_is_noticed(tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path, mode="writer") as first, SuffixCache.open(tmp_path) as second:
        (tmp_path / "writer.lock").unlink()
        modes = lambda: sorted((first.stats().mode, second.stats().mode))  # noqa: E731
        wait(lambda: (tmp_path / "writer.lock").exists() and modes() == ["follower", "writer"])
        with pytest.raises(CacheLockedError):
            SuffixCache.open(tmp_path, mode="writer")


names = st.text(st.characters(exclude_categories=[]), min_size=1, max_size=8)


@costly
@given(tenant=names, session=names)
@example(tenant="a\0b", session="\ud800\x1a001a")
def test_any_name_can_be_stored_and_forgotten(location: str | Path, tenant: str, session: str) -> None:
    """A name that a database refuses would end all writing."""
    with SuffixCache.open(location) as cache:
        record(cache, [1, 2], session=session)
        cache.flush()
        assert cache.forget(session=session + "x") == 0
        assert cache.forget(session=session) == 1
        record(cache, [1, 2], namespace=tenant)
        cache.flush()
        assert cache.forget(tenant=tenant) == 1
        assert outputs(location) == [] and cache.stats().unwritten == 0


def test_the_log_of_deletions_is_bounded(location: str | Path) -> None:
    """A process that has not looked for long takes anything to be deleted, and a new one nothing."""
    with SuffixCache.open(location) as cache:
        record(cache, [5, 6, 7], session="s")
        cache.flush()
        rows = [f"({number + 1}, 0, '{'x' * 64}', false)" for number in range(1500)]
        execute(location, f"INSERT INTO deletions (id, created_at, tenant, searched) VALUES {', '.join(rows)}")
        if isinstance(location, str):
            execute(location, "SELECT setval(pg_get_serial_sequence('deletions', 'id'), 1500)")
        assert cache.forget(session="none") == 0
        [(count, anything)] = execute(location, "SELECT count(*), sum(CASE WHEN searched THEN 1 END) FROM deletions")
        assert count <= 1001 and anything == 1
    with SuffixCache.open(location) as cache:
        assert cache.stats().sequences == 1


# How much it takes.


def budget(location: str | Path, size: int) -> int:
    """A limit that leaves about `size` bytes for rows: PostgreSQL's tables take some when they are empty."""
    return size + (800_000 if isinstance(location, str) else 0)


@SQLITE_FIRST
def test_the_database_stays_within_its_budget_and_the_oldest_of_the_largest_tenant_go(location: str | Path) -> None:
    limit = budget(location, 600_000)
    with SuffixCache.open(location, disk_bytes=limit) as cache:
        for number in range(200):
            record(cache, [number, *text(number, 2000)], namespace="quiet" if number < 10 else "flood")
            if number % 10 == 9:
                cache.flush()
        cache.flush()
        assert cache.stats().disk_bytes <= limit
    kept = [output[0] for output in outputs(location)]
    assert kept[:10] == list(range(10))
    assert kept[10:] == list(range(kept[10], 200)) and 20 < len(kept) < 150


def test_a_tenant_over_its_share_loses_its_own_oldest(location: str | Path) -> None:
    limit = 200_000
    with SuffixCache.open(location, tenant_disk_bytes=limit) as cache:
        for number in range(200):
            for tenant in ("flood", "quiet") if number < 20 else ("flood",):
                record(cache, [number, *text(number, 500)], namespace=tenant)
        cache.flush()

        def taken() -> int:
            sums = execute(location, "SELECT tenant, sum(length(tokens)), count(*) FROM sequences GROUP BY tenant")
            sizes = {tenant: (int(size), count) for tenant, size, count in sums}
            assert sizes["quiet"][1] == 20
            return sizes["flood"][0]

        wait(lambda: taken() <= limit)
        assert taken() > limit // 4
    flood = [output[0] for output in outputs(location)][20:]
    assert flood == list(range(flood[0], 200)), "the oldest went"


def test_a_follower_leaves_it_to_the_writer(location: str | Path) -> None:
    limit = budget(location, 400_000)
    with SuffixCache.open(location, disk_bytes=limit, mode="follower") as follower:
        for number in range(60):
            record(follower, text(number, 4000))
        follower.flush()
        assert len(outputs(location)) == 60
        with SuffixCache.open(location, disk_bytes=limit) as writer:
            wait(lambda: writer.stats().disk_bytes <= limit)
            assert 5 < len(outputs(location)) < 60
