from __future__ import annotations

import logging
import os
import sqlite3
import stat
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentspec.cache import SuffixCache
from agentspec.cache.row import Row
from agentspec.cache.store import DATABASE, Store
from agentspec.cache.tokens import Tokens
from agentspec.errors import CacheError, CacheFormatError, CacheLockedError, ConfigurationError
from agentspec.types import Labels, Namespace


def row(number: int, tokens: object, context: object = ()) -> Row:
    labels = Labels("s", "w", None)
    arrays = [np.asarray(part, dtype=np.int32) for part in (tokens, context)]
    return Row(number, Namespace("t", "m", "k", "c"), labels, arrays[0], arrays[1], 12.5)


def text(seed: int, length: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 2**31 - 1, length).astype(np.int32)


def opened(folder: Path, disk_bytes: int | None = None) -> Store:
    return Store.open(folder, disk_bytes=disk_bytes, mode="auto")


def execute(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / DATABASE)) as connection:
        connection.execute(statement)
        connection.commit()


token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=80)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(token_lists.filter(bool), token_lists), max_size=5))
def test_rows_round_trip(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[list[int], list[int]]]) -> None:
    folder = tmp_path_factory.mktemp("store")
    store = opened(folder)
    for number, (tokens, context) in enumerate(rows):
        store.put(row(number, tokens, context))
    store.close()
    store = opened(folder)
    loaded = store.newest(most=10_000)
    store.close()
    assert [(r.sequence, r.tokens.tolist(), r.context.tolist()) for r in loaded] == [
        (number, tokens, context) for number, (tokens, context) in enumerate(rows)
    ]
    assert all((r.namespace, r.labels, r.created_at) == (row(0, []).namespace, row(0, []).labels, 12.5) for r in loaded)


def test_folder_and_files_are_private(tmp_path: Path) -> None:
    store = opened(tmp_path / "deep" / "cache")
    store.put(row(1, [1, 2]))
    store.flush()
    assert stat.S_IMODE((tmp_path / "deep" / "cache").stat().st_mode) == 0o700
    for file in (tmp_path / "deep" / "cache").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    store.close()


def test_the_home_folder_is_expanded(tmp_path: Path) -> None:
    code = "from agentspec.cache import SuffixCache; print(SuffixCache.open('~/here').path)"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "HOME": str(tmp_path)}, capture_output=True)
    assert done.stdout.decode().strip() == str(tmp_path / "here")


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError, match="file"):
        SuffixCache.open(tmp_path / "file")


def test_modes(tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path, mode="follower") as follower:
        assert follower.stats().mode == "follower"
        with SuffixCache.open(tmp_path, mode="writer") as writer:
            assert writer.stats().mode == "writer"
            with SuffixCache.open(tmp_path) as second:
                assert second.stats().mode == "follower"
            with pytest.raises(CacheLockedError, match=str(os.getpid())):
                SuffixCache.open(tmp_path, mode="writer")
    with SuffixCache.open(tmp_path) as cache:
        assert cache.stats().mode == "writer"


def test_processes_see_what_others_add(tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path) as writer, SuffixCache.open(tmp_path) as follower:
        for mine, others, base in ((writer, follower, 100), (follower, writer, 200)):
            with mine.request([1]) as request:
                request.extend([base, base + 1, base + 2])
            mine.flush()
            time.sleep(1.05)
            with others.request([9, base]) as request:
                assert request.draft(max_tokens=2).tokens.tolist() == [base + 1, base + 2]
        assert writer.stats().sequences == follower.stats().sequences == 2


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


@pytest.mark.parametrize("reports", [1, 5, 20])
def test_kill_after_flush_loses_nothing(tmp_path: Path, reports: int) -> None:
    with subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        durable = [int(worker.stdout.readline()) for _ in range(reports)][-1]
        worker.kill()
    store = opened(tmp_path)
    stored = [r.tokens.tolist() for r in store.newest(most=1 << 30)]
    store.close()
    assert len(stored) > durable
    assert stored == [[turn, turn + 1, turn + 2] for turn in range(len(stored))]


def test_the_database_stays_within_its_budget(tmp_path: Path) -> None:
    limit = 600_000
    store = opened(tmp_path, disk_bytes=limit)
    for number in range(300):
        store.put(row(number, text(number, 2000)))
        if number % 10 == 0:
            store.flush()
    store.flush()
    assert store.disk_bytes() <= limit
    kept = [r.sequence for r in store.newest(most=1 << 30)]
    store.close()
    assert kept == list(range(kept[0], 300))  # the oldest went
    assert len(kept) > 20


def test_a_tiny_budget_keeps_nothing_and_goes_on(tmp_path: Path) -> None:
    store = opened(tmp_path, disk_bytes=1)
    store.put(row(1, text(1, 2000)))
    store.flush()
    assert store.newest(most=1 << 30) == []
    store.close()


def test_hits_and_learned_state_are_kept(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put(row(5, [1, 2]))
    store.put_usage([(5, 3), (99, 1)], {"n": b"one"})
    store.put_usage([(5, 2)], {"n": b"two"})
    store.close()
    follower = Store.open(tmp_path, disk_bytes=None, mode="follower")
    follower.put_usage([(5, 1)], {"n": b"three"})  # only the writer's state is kept
    follower.flush()
    assert follower.learned() == {"n": b"two"}
    follower.close()
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
        assert connection.execute("SELECT number, hits FROM sequences").fetchall() == [(5, 6)]


def test_serving_goes_on_when_writing_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with SuffixCache.open(tmp_path) as cache, caplog.at_level(logging.WARNING):
        execute(
            tmp_path, "CREATE TRIGGER full BEFORE INSERT ON sequences BEGIN SELECT RAISE(ABORT, 'disk is full'); END"
        )
        for turn in range(3):
            with cache.request([1]) as request:
                request.extend([40 + turn, 50 + turn])
            with pytest.raises(CacheError, match="disk is full"):
                cache.flush()
        stats = cache.stats()
        assert stats.store_error is not None and "disk is full" in stats.store_error
        assert stats.sequences == 3
        with cache.request([9, 41]) as request:
            assert request.draft(max_tokens=1).tokens.tolist() == [51]
    assert len(caplog.records) == 1


def test_a_missing_table_is_damage(tmp_path: Path) -> None:
    SuffixCache.open(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
        connection.execute("DROP TABLE learned")
    with pytest.raises(CacheFormatError, match="move it away"):
        SuffixCache.open(tmp_path)


@pytest.mark.parametrize("damage", ["x'00'", "zeroblob(40)"])
def test_a_damaged_row_is_told_on_open_and_skipped_while_following(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    writer, follower = opened(tmp_path), opened(tmp_path)
    writer.put(row(1 << 32, [1, 2, 3]))
    writer.put(row((1 << 32) + 1, [4, 5, 6]))
    writer.flush()
    execute(tmp_path, f"UPDATE sequences SET tokens = {damage} WHERE id = 1")
    time.sleep(1.05)
    assert [r.tokens.tolist() for r in follower.news(origin=2)] == [[4, 5, 6]]
    assert "damaged" in caplog.text
    with pytest.raises(CacheFormatError, match="damaged"):
        writer.newest(most=100)
    writer.close()
    follower.close()
    for _ in range(2):  # and the folder is not left locked
        with pytest.raises(CacheFormatError, match="damaged"):
            SuffixCache.open(tmp_path, mode="writer")


def test_a_database_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / DATABASE).mkdir()
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="cannot be opened"):
            SuffixCache.open(tmp_path, mode="writer")


def test_a_damaged_database_is_refused_and_the_lock_released(tmp_path: Path) -> None:
    (tmp_path / DATABASE).write_bytes(b"not a database at all, just text")
    for _ in range(2):
        with pytest.raises(CacheFormatError, match="not a database"):
            SuffixCache.open(tmp_path, mode="writer")
