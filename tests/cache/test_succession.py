"""Who is the writer after the writer: one process at a time, and always one where one is wanted."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import sqlalchemy as sa

from agentspec.cache import SuffixCache
from agentspec.cache.storage.connection import open_database
from agentspec.cache.storage.database import Database
from agentspec.cache.storage.schema import learned, sequences
from agentspec.cache.storage.tables import prepare
from agentspec.errors import CacheLockedError

if TYPE_CHECKING:
    from conftest import Server


def wait(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)


def record(cache: SuffixCache, number: int, length: int) -> None:
    with cache.request([1, 2], session=f"s{number}") as request:
        request.extend(np.random.default_rng(number).integers(0, 2**31 - 2, length).astype(np.int32))


def count(location: str | Path, table: sa.Table = sequences) -> int:
    database = open_database(location)
    try:
        with database.engine.connect() as connection:
            return int(connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one())
    finally:
        database.close()


@pytest.mark.parametrize("location", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)], indirect=True)
def test_after_a_rolling_restart_the_second_process_does_the_writers_work(location: str | Path) -> None:
    first = SuffixCache.open(location, mode="writer")
    for number in range(500):
        record(first, number, 10)
    first.flush()
    with SuffixCache.open(location, retention=2.0, disk_bytes=8 << 20) as second:
        assert (second.stats().mode, second.stats().sequences) == ("follower", 500)
        first.close()
        wait(lambda: second.stats().mode == "writer")
        wait(lambda: (second.stats().sequences, count(location)) == (0, 0))
        with pytest.raises(CacheLockedError):
            SuffixCache.open(location, mode="writer")


@pytest.mark.slow
def test_it_keeps_the_budget_learns_and_writes_segments(location: str | Path) -> None:
    first = SuffixCache.open(location, mode="writer")
    limit = (1 << 20) + (0 if isinstance(location, Path) else 800_000)  # what PostgreSQL's partitions take when empty
    with SuffixCache.open(location, disk_bytes=limit) as second:
        for number in range(5):
            record(second, number, 40_000)
        second.flush()
        assert second.stats().disk_bytes > 1 << 19
        assert count(location, learned) == 0
        first.close()
        wait(lambda: second.stats().mode == "writer")
        for number in range(5, 10):
            record(second, number, 40_000)
        wait(lambda: 0 < count(location) < 10 and second.stats().disk_bytes <= limit)
        second.flush()
        assert count(location, learned) == 1
    if isinstance(location, Path):
        with SuffixCache.open(location) as cache:
            assert cache.compact() > 0  # it is the writer
            assert list(location.glob("*.segment"))


HOLDER = """
import sys, time
from agentspec.cache import SuffixCache
cache = SuffixCache.open(sys.argv[1], mode="writer")
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_killed_writer_is_succeeded_and_only_by_one(location: str | Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(location)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            caches = [SuffixCache.open(location) for _ in range(3)]
            caches.append(SuffixCache.open(location, mode="follower"))
            assert [cache.stats().mode for cache in caches] == ["follower"] * 4
        finally:
            holder.kill()

    def modes() -> list[str]:
        return [cache.stats().mode for cache in caches]

    for _ in range(3):
        wait(lambda: modes().count("writer") == 1)
        assert caches[-1].stats().mode == "follower"  # as it was asked to
        caches.pop(modes().index("writer")).close()
    assert modes() == ["follower"]
    caches.pop().close()


def candidates(location: str | Path, number: int) -> list[Database]:
    databases = []
    for _ in range(number):
        database = open_database(location)
        database.connect()
        prepare(database)
        with suppress(CacheLockedError):
            database.acquire_writer()
        databases.append(database)
    return databases


def test_a_lost_connection_moves_the_part_and_the_loser_knows(server: Server, postgres: str) -> None:
    first, second = candidates(postgres, 2)
    with closing(first), closing(second):
        for _ in range(3):
            assert (first.is_writer, second.is_writer) == (True, False)
            schema = f"hashtext('{postgres.rpartition('search_path%3D')[2]}')::bigint & 4294967295"
            holders = f"SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = ({schema})::oid AND granted"
            server.execute(f"SELECT pg_terminate_backend(pid, 60000) FROM ({holders}) AS holding")
            second.renew_lease()
            assert second.is_writer
            with first.writing() as connection:  # which has not noticed
                assert first.is_writer and not first.confirm_writer(connection)
            with second.writing() as connection:
                assert second.confirm_writer(connection)
            first.renew_lease()
            assert not first.is_writer
            first, second = second, first


def test_a_server_that_was_away_has_one_writer_again(server: Server, postgres: str) -> None:
    databases = candidates(postgres, 3)
    for _ in range(2):
        server.stop()
        for database in databases:
            with suppress(sa.exc.DBAPIError):
                database.renew_lease()
        server.start()
        for database in databases:
            with suppress(sa.exc.DBAPIError):  # the first use finds the old connection broken
                database.renew_lease()
            database.renew_lease()
        assert [database.is_writer for database in databases].count(True) == 1
    for database in databases:
        database.close()


def test_a_lock_file_that_was_deleted_or_replaced_is_noticed(tmp_path: Path) -> None:
    first, second = candidates(tmp_path, 2)
    with closing(first), closing(second):
        (tmp_path / "writer.lock").unlink()
        second.renew_lease()
        assert second.is_writer
        with first.writing() as connection:
            assert not first.confirm_writer(connection)
        first.renew_lease()
        assert not first.is_writer
        second.close()
        first.renew_lease()
        assert first.is_writer
