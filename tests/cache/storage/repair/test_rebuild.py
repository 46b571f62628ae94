"""A database is mended beside processes that use it, and a killed process leaves the old one or the new."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from agentspec.cache import SuffixCache
from agentspec.cache.record import SequenceRecord
from agentspec.cache.storage.connection import opened_database
from agentspec.cache.storage.repair import rebuild
from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.cache.storage.sqlite import DATABASE
from agentspec.errors import CacheDamagedError, CacheFormatError
from agentspec.types import Labels, Namespace

ROWS, PAGE = 60, 4096


def record(number: int) -> SequenceRecord:
    tokens = np.random.default_rng(number).integers(0, 50_000, 40).astype(np.int32)
    return SequenceRecord(number, Namespace(f"t{number % 3}"), Labels(f"s{number}"), tokens, tokens[:0], 12.5)


def opened(folder: Path) -> SequenceStore:
    return SequenceStore.open(folder, disk_bytes=None, mode="follower")


def numbers(folder: Path) -> set[int]:
    with closing(opened(folder)) as store:
        return {record.sequence for record in store.records()}


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    with closing(opened(tmp_path / "cache")) as store:
        for number in range(ROWS):
            store.put(record(number))
        store.flush()
    return tmp_path / "cache"


def spoil(folder: Path, name: str) -> None:
    """Write zeros over the root page of a table or an index, behind the back of whoever uses the file."""
    with closing(sqlite3.connect(folder / DATABASE)) as connection:
        query = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        [root] = connection.execute(query, (name,)).fetchone()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    script = f"f = open({str(folder / DATABASE)!r}, 'r+b'); f.seek({(root - 1) * PAGE}); f.write(bytes({PAGE}))"
    subprocess.run([sys.executable, "-c", script], check=True)  # closing it here would end SQLite's locks


KILLED = """
import os, signal, sys
from pathlib import Path
from agentspec.cache.storage.repair import rebuild, salvage

def after(module, name, count):
    original, left = getattr(module, name), [count]
    def counted(*args, **options):
        result = original(*args, **options)
        left[0] -= 1
        if left[0] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(module, name, counted)

class Copying:
    def __init__(self, connection):
        self.connection = connection

    def __getattr__(self, name):
        return getattr(self.connection, name)

    def backup(self, target, *, pages, progress):
        def step(*status):
            progress(*status)
            self.copied()
        self.connection.backup(target, pages=pages, progress=step)

    def copied(self):
        pass

fresh = rebuild._fresh
rebuild._fresh = lambda source: Copying(fresh(source))
places = {"salvage": salvage, "rebuild": rebuild, "copying": Copying}
after(places[sys.argv[2]], sys.argv[3], int(sys.argv[4]))
rebuild.rebuild(Path(sys.argv[1]), 5.0)
os.kill(os.getpid(), signal.SIGKILL)
"""
STEPS = [
    ("rebuild", "_fresh", 1),
    ("salvage", "_copy", 3),
    ("salvage", "_note_lost_deletions", 1),
    ("rebuild", "_fill", 1),
    ("copying", "copied", 3),
    ("rebuild", "_fresh", 99),  # at the end
]


@pytest.mark.parametrize(
    ("module", "name", "count"),
    [STEPS[4]] + [pytest.param(*step, marks=pytest.mark.slow) for step in STEPS if step != STEPS[4]],
)
def test_a_killed_process_leaves_the_old_database_or_the_new(filled: Path, module: str, name: str, count: int) -> None:
    spoil(filled, "ix_sequences_tenant")
    command = [sys.executable, "-c", KILLED, str(filled / DATABASE), module, name, str(count)]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    is_new = not rebuild.faults(filled / DATABASE)
    assert is_new == (count == 99)
    assert {file.name for file in filled.iterdir()} <= {DATABASE + end for end in ("", "-wal", "-shm")}
    assert numbers(filled) == set(range(ROWS))
    with opened_database(filled) as database:
        assert database.mend() == (None if is_new else [])
    assert rebuild.faults(filled / DATABASE) == [] and numbers(filled) == set(range(ROWS))


def test_processes_go_on_while_it_is_mended(filled: Path) -> None:
    with SuffixCache.open(filled, mode="writer") as writer, SuffixCache.open(filled, mode="follower") as follower:
        spoil(filled, "sqlite_autoindex_sequences_1")
        with opened_database(filled) as database:
            assert database.mend() == []
        for cache, token in ((writer, 61), (follower, 71)):
            with cache.request([1, 2], session="new") as request:
                request.extend([token, token + 1, token + 2])
            cache.flush()
        assert writer.stats().store_error is follower.stats().store_error is None
    assert len(numbers(filled)) == ROWS + 2 and rebuild.faults(filled / DATABASE) == []


def test_what_was_written_while_it_waited_is_kept(filled: Path) -> None:
    spoil(filled, "learned")
    with closing(opened(filled)) as store:
        with store.database.writing() as connection:
            mending = threading.Thread(target=store.database.mend)
            mending.start()
            mending.join(0.2)
            connection.exec_driver_sql("UPDATE sequences SET hits = 5 WHERE number = 7")
        mending.join()
        with store.database.engine.connect() as connection:
            [hits] = connection.exec_driver_sql("SELECT hits FROM sequences WHERE number = 7").one()
    assert hits == 5 and rebuild.faults(filled / DATABASE) == []


def test_no_number_is_handed_out_twice_where_the_counters_are_lost(filled: Path) -> None:
    with SuffixCache.open(filled, mode="follower") as follower:
        assert follower.forget(session="s3") == 1
        spoil(filled, "sqlite_sequence")
        with opened_database(filled) as database:
            assert database.mend() == []
        with SuffixCache.open(filled, mode="writer") as writer:
            with writer.request([1, 2], session="new") as request:
                request.extend([5, 6, 7])
            writer.flush()
            assert writer.forget(session="s4") == 1
        assert follower._sync is not None
        follower._sync._catch_up()
        assert follower.stats().unread == 0
        with follower.request([1, 2], store=False) as request:
            assert request.draft(3).tokens.tolist() == [5, 6, 7]


def test_lost_deletions_make_every_process_look_for_itself(filled: Path) -> None:
    with SuffixCache.open(filled, mode="follower", namespace="t0") as follower:
        text = record(3).tokens
        with follower.request(text[:5], store=False) as request:
            assert request.draft(4).tokens.tolist() == text[5:9].tolist()
        with closing(opened(filled)) as store, store.database.writing() as connection:
            connection.exec_driver_sql("DELETE FROM sequences WHERE number = 3")  # whose deletion is not known
            connection.exec_driver_sql("INSERT INTO deletions (created_at, salt, searched) VALUES (1, 'x', 0)")
        spoil(filled, "deletions")
        with opened_database(filled) as database:
            assert database.mend() == ["deletions: rows that cannot be read: from 1 on"]
        follower._deleter.apply_deletions()
        with follower.request(text[:5], store=False) as request:
            assert request.draft(4).tokens.tolist() != text[5:9].tolist()


def test_a_lost_list_of_tables_is_told_and_nothing_is_changed(filled: Path) -> None:
    data = bytearray((filled / DATABASE).read_bytes())
    data[100:PAGE] = bytes(PAGE - 100)
    (filled / DATABASE).write_bytes(data)
    for mode in ("writer", "follower"):
        with pytest.raises(CacheFormatError):
            SuffixCache.open(filled, mode=mode)  # type: ignore[arg-type]
    with (
        pytest.raises(CacheDamagedError, match=r"nothing in it can be read.*delete it"),
        opened_database(filled) as database,
    ):
        database.mend()
    assert (filled / DATABASE).read_bytes() == bytes(data)


def test_it_waits_for_no_one_for_ever(filled: Path) -> None:
    spoil(filled, "learned")
    with closing(sqlite3.connect(filled / DATABASE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            rebuild.rebuild(filled / DATABASE, 0.01)
