from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy import exc

from agentspec.cache import SuffixCache
from agentspec.cache.deletion import select
from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.cache.storage.sqlite import DATABASE
from agentspec.cache.tokens import SequenceRecord, Tokens
from agentspec.errors import (
    CacheError,
    CacheFormatError,
    CacheLockedError,
    CacheUnavailableError,
    CacheVersionError,
    ConfigurationError,
)
from agentspec.types import Namespace
from tests.conftest import costly


def row(number: int, tokens: object, context: object = ()) -> SequenceRecord:
    arrays = [np.asarray(part, dtype=np.int32) for part in (tokens, context)]
    return SequenceRecord(number, Namespace("t", "m", "k", "c"), "s", arrays[0], arrays[1], 12.5)


def text(seed: int, length: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 2**31 - 1, length).astype(np.int32)


def opened(location: str | Path, disk_bytes: int | None = None, tenant_disk_bytes: int | None = None) -> SequenceStore:
    return SequenceStore.open(location, disk_bytes=disk_bytes, tenant_disk_bytes=tenant_disk_bytes, mode="auto")


def execute(location: str | Path, *statements: str) -> list[tuple[object, ...]]:
    """The rows of the last statement."""
    engine = sa.create_engine(location if isinstance(location, str) else f"sqlite:///{location / DATABASE}")
    with engine.begin() as connection:
        results = [connection.exec_driver_sql(statement) for statement in statements]
        rows = [tuple(row) for row in results[-1]] if results[-1].returns_rows else []
    engine.dispose()
    return rows


BREAK = {
    "sqlite": ["CREATE TRIGGER broken BEFORE INSERT ON sequences BEGIN SELECT RAISE(ABORT, 'disk is gone'); END"],
    "postgres": [
        "CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'disk is gone'; END $$",
        "CREATE TRIGGER broken BEFORE INSERT ON sequences FOR EACH ROW EXECUTE FUNCTION broken()",
    ],
}


token_lists = st.lists(st.integers(0, 2**31 - 2), max_size=80)


def test_folder_and_files_are_private(tmp_path: Path) -> None:
    store = opened(tmp_path / "deep" / "cache")
    store.put(row(1, [1, 2]))
    store.flush()
    assert stat.S_IMODE((tmp_path / "deep" / "cache").stat().st_mode) == 0o700
    for file in (tmp_path / "deep" / "cache").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    store.close()


def test_the_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with SuffixCache.open("~/here") as cache:
        assert cache.path == tmp_path / "here"


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError, match="file"):
        SuffixCache.open(tmp_path / "file")


def test_modes(location: str | Path) -> None:
    with SuffixCache.open(location, mode="follower") as follower:
        assert follower.stats().mode == "follower"
        with SuffixCache.open(location, mode="writer") as writer:
            assert writer.stats().mode == "writer"
            with SuffixCache.open(location) as second:
                assert second.stats().mode == "follower"
            with pytest.raises(CacheLockedError, match=str(os.getpid())):
                SuffixCache.open(location, mode="writer")
    with SuffixCache.open(location) as cache:
        assert cache.stats().mode == "writer"


def test_processes_see_what_others_add(location: str | Path) -> None:
    with SuffixCache.open(location) as writer, SuffixCache.open(location) as follower:
        for mine, others, base in ((writer, follower, 100), (follower, writer, 200)):
            with mine.request([1]) as request:
                request.extend([base, base + 1, base + 2])
            mine.flush()
            limit = time.monotonic() + 60
            while others.stats().sequences < base // 100:
                assert time.monotonic() < limit
                time.sleep(0.05)
            with others.request([9, base]) as request:
                assert request.draft(max_tokens=2).tokens.tolist() == [base + 1, base + 2]
        assert writer.stats().sequences == follower.stats().sequences == 2


IDLE = """
import sys, time
from agentspec.cache import SuffixCache
cache = SuffixCache.open(sys.argv[1], mode="follower")
print("open", flush=True)
known = 0
while True:
    if (found := cache.stats().sequences) != known:
        known = found
        print(found, flush=True)
    time.sleep(0.01)
"""


WORKER = """
import sys
from agentspec.cache import SuffixCache
cache = SuffixCache.open(sys.argv[1])
for turn in range(100000):
    with cache.request([1, 2]) as request:
        request.extend([turn, turn + 1, turn + 2])
    if turn % 7 == 6:
        cache.flush()
        print(turn, flush=True)
"""


names = st.text(st.characters(exclude_categories=[]), max_size=8)


@costly
@given(tenant=names, session=names)
@example(tenant="a\0b", session="\ud800\x1a001a")
def test_any_name_can_be_stored_and_forgotten(location: str | Path, tenant: str, session: str) -> None:
    """A name that a database refuses would end all writing."""
    store = opened(location)
    kept = replace(row(1, [1, 2]), namespace=Namespace("t", "m"), session=session)
    store.put(kept)
    store.flush()
    assert [found.session for found in store.records()] == [kept.session]
    assert store.forget(select(session=session + "x")) == 0
    assert store.forget(select(session=session)) == 1
    # Of no session: one that was just forgotten by that name would not be written.
    store.put(replace(row(2, [1, 2]), namespace=Namespace(tenant, "m"), session=None))
    store.flush()
    assert store.forget(select(tenant=tenant)) == 1
    store.close()


def test_serving_goes_on_when_writing_fails(location: str | Path, caplog: pytest.LogCaptureFixture) -> None:
    with SuffixCache.open(location) as cache, caplog.at_level(logging.WARNING):
        execute(location, *BREAK["postgres" if isinstance(location, str) else "sqlite"])
        for turn in range(3):
            with cache.request([1]) as request:
                request.extend([40 + turn, 50 + turn])
            with pytest.raises(CacheError, match="disk is gone"):
                cache.flush()
        stats = cache.stats()
        assert stats.store_error is not None and "disk is gone" in stats.store_error
        assert stats.sequences == 3
        with cache.request([9, 41]) as request:
            assert request.draft(max_tokens=1).tokens.tolist() == [51]
    assert len(caplog.records) == 1


def test_a_row_that_the_database_refuses_holds_up_no_other(
    location: str | Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(location)
    with caplog.at_level(logging.WARNING), store.database.writing():  # all wait for this, and are written together
        for number in (1, 2**70, 2, 3, 2**71, 4):
            store.put(row(number, [1, 2]))
    with pytest.raises(CacheError, match="2 writes were dropped"):
        store.flush()
    store.put(row(5, [1, 2]))
    store.flush()
    assert store.error is None and store.dropped == 2
    store.close()
    assert execute(location, "SELECT number FROM sequences ORDER BY id") == [(1,), (2,), (3,), (4,), (5,)]
    assert len([one for one in caplog.records if one.name.startswith("agentspec")]) == 1  # psycopg warns too


def test_it_is_an_outage_while_all_connections_are_in_use(location: str | Path) -> None:
    with SuffixCache.open(location) as cache, contextlib.ExitStack() as busy:
        assert cache._store is not None
        engine = cache._store.database.engine
        pool = cast(sa.QueuePool, engine.pool)
        pool._timeout = 0.01
        while True:
            try:
                busy.enter_context(engine.connect())
            except sa.exc.TimeoutError:
                break
        with cache.request([1], namespace="new") as request:  # which is to be loaded
            request.extend([40, 50])
        for call in (cache.flush, lambda: cache.forget(tenant="no one")):
            with pytest.raises(CacheError, match="QueuePool"):
                call()
        pool._timeout = 30
    assert execute(location, "SELECT count(*) FROM sequences") == [(1,)]


def test_a_follower_that_may_only_read_goes_on_in_memory(location: str | Path) -> None:
    SuffixCache.open(location).close()
    statements = BREAK["postgres" if isinstance(location, str) else "sqlite"]
    execute(
        location,
        *statements,
        statements[-1].replace("broken BEFORE INSERT ON sequences", "no BEFORE INSERT ON processes"),
    )
    with SuffixCache.open(location, mode="follower") as cache:
        for turn in range(2):
            with cache.request([1]) as request:
                request.extend([40 + turn, 50 + turn])
        with pytest.raises(CacheError, match="disk is gone"):
            cache.flush()
        assert cache.stats().sequences == 2 and cache.stats().store_error


def test_an_open_that_fails_leaves_no_thread(location: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_: SequenceStore) -> int:
        raise CacheUnavailableError("away")

    monkeypatch.setattr(SequenceStore, "_newest_deletion", away)
    before = threading.active_count()
    with pytest.raises(CacheUnavailableError, match="away"):
        SuffixCache.open(location, mode="writer")
    assert threading.active_count() == before


def test_a_missing_table_is_damage(location: str | Path) -> None:
    SuffixCache.open(location).close()
    execute(location, "DROP TABLE deletions")
    with pytest.raises(CacheFormatError, match="move it away"):
        SuffixCache.open(location, mode="follower")
    if isinstance(location, Path):
        with SuffixCache.open(location) as cache, cache.request([1]) as request:
            request.extend([2, 3])
        assert len(list(location.glob("*.damaged-*"))) == 1
        return
    with pytest.raises(CacheFormatError, match="move it away"):
        SuffixCache.open(location)


def test_a_database_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / DATABASE).mkdir()
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="no file"):
            SuffixCache.open(tmp_path, mode="writer")


def test_what_is_forgotten_during_an_erasure_is_erased_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, erasures = opened(tmp_path), 0
    erase = store.database.secure_erase

    def forget_meanwhile(*, rewrite: bool) -> bool:
        nonlocal erasures
        erasures += 1
        if erasures == 1:
            store.forget(select(older_than=0))
        return erase(rewrite=rewrite)

    store.put(row(1, [1, 2]))
    store.forget(select(tenant="t"))
    store.finish_deletion(*store.pending_deletions()[0])
    store.put(row(2, [1, 2]))
    monkeypatch.setattr(store.database, "secure_erase", forget_meanwhile)
    for _ in range(3):
        store.secure_erase()
    assert erasures == 2
    store.close()


def locked(_: object = None) -> None:
    """Instead of `writing`, for as long as another process writes."""
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY
    raise exc.OperationalError("begin", None, error)


def test_what_waits_while_nothing_can_be_written_is_forgotten_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once this process knows of a deletion, it writes what comes later of the same session: nothing of before may."""
    with contextlib.closing(opened(tmp_path)) as store, contextlib.closing(opened(tmp_path)) as other:
        other.put(row(1, [5, 6]))
        other.flush()
        monkeypatch.setattr(store._database, "writing", locked)
        store.put(row(2, [7, 8]))
        with pytest.raises(CacheError, match="locked"):
            store.flush()
        assert other.forget(select(session="s")) == 1
        [(number, scope)] = store.pending_deletions()
        store.finish_deletion(number, scope)
        monkeypatch.undo()
        store.put(row(3, [9]))
        store.flush()
        assert [one.sequence for one in other.records()] == [3]


def test_a_database_that_fails_while_the_cache_starts_is_unavailable(
    location: str | Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(_: SequenceStore) -> int:
        raise CacheError("away")

    monkeypatch.setattr(SequenceStore, "position", away)
    with pytest.raises(CacheError, match="away"):
        SuffixCache.open(location, mode="writer")
    with SuffixCache.open(location) as cache:
        assert cache.stats().store_error == "away" and "in memory only" in caplog.text


WORKER = """
import sys
from agentspec.cache import SuffixCache
cache = SuffixCache.open(sys.argv[1])
for turn in range(100000):
    with cache.request([1, 2]) as request:
        request.extend([turn, turn + 1, turn + 2])
    if turn % 7 == 6:
        cache.flush()
        print(turn, flush=True)
"""


@pytest.mark.parametrize("reports", [pytest.param(1, marks=pytest.mark.slow), 20])
def test_kill_after_flush_loses_nothing(location: str | Path, reports: int) -> None:
    with subprocess.Popen([sys.executable, "-c", WORKER, str(location)], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        durable = [int(worker.stdout.readline()) for _ in range(reports)][-1]
        worker.kill()
    store = opened(location)
    stored = [r.tokens.tolist() for r in store.records()]
    store.close()
    assert len(stored) > durable
    assert stored == [[turn, turn + 1, turn + 2] for turn in range(len(stored))]


def test_a_database_of_another_version_is_refused_and_the_lock_released(tmp_path: Path) -> None:
    SuffixCache.open(tmp_path).close()
    execute(tmp_path, "UPDATE agentspec_meta SET value = '4'")
    for _ in range(2):
        with pytest.raises(CacheVersionError, match=r"of version 4.*move the database away"):
            SuffixCache.open(tmp_path, mode="writer")
