"""A row that cannot be read is left out, counted and told of once; everything else goes on."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from agentspec.cache import SuffixCache
from agentspec.cache.record import SequenceRecord
from agentspec.cache.storage.rows.pages import PIECE, RowPages
from agentspec.cache.storage.rows.reader import POLLED
from agentspec.cache.storage.schema import namespaces, sequences
from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.cache.storage.sqlite import DATABASE
from agentspec.errors import CacheUnavailableError
from agentspec.types import Labels, Namespace

ROWS = 1000


def row(number: int, tenant: str = "t") -> SequenceRecord:
    tokens = np.random.default_rng(number).integers(0, 2**31 - 2, 20).astype(np.int32)
    return SequenceRecord(number, Namespace(tenant), Labels(f"s{number}"), tokens, tokens[:5], 12.5)


def opened(location: str | Path) -> SequenceStore:
    return SequenceStore.open(location, disk_bytes=None, mode="follower")


def fill(location: str | Path, count: int = ROWS) -> None:
    store = opened(location)
    for number in range(count):
        store.put(row(number, f"t{number % 3}"))
    store.flush()
    store.close()


def execute(location: str | Path, statement: str, *values: object) -> None:
    store = opened(location)
    with store._database.writing() as connection:
        connection.execute(sa.text(statement), dict(zip("abc", values, strict=False)))
    store.close()


def flip(location: str | Path, id_: int) -> None:
    store = opened(location)
    with store._database.writing() as connection:
        [packed] = connection.execute(sa.select(sequences.c.tokens).where(sequences.c.id == id_)).one()
        data = bytearray(packed)
        data[len(data) // 2] ^= 4
        connection.execute(sequences.update().where(sequences.c.id == id_).values(tokens=bytes(data)))
    store.close()


@pytest.mark.parametrize("location", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)], indirect=True)
def test_one_flipped_bit_costs_one_row(location: str | Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(location)
    flip(location, 500)
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING), SuffixCache.open(location) as cache:
            assert (cache.stats().sequences, cache.stats().damaged) == (ROWS - 1, 1)
            assert cache.stats().store_error is None
            [told] = caplog.records
            assert "sequence 500" in told.message and "cache repair" in told.message
            cache.compact()
    store = opened(location)
    assert len(list(store.records())) == ROWS - 1
    [problem] = store.problems()
    assert "sequence 500" in problem
    store.close()
    with SuffixCache.open(location, mode="follower") as cache:
        assert cache.forget(session="s499") == 1  # by the columns that can be read
        assert cache.forget(tenant="t0") == 334
        assert cache._store is not None
        cache._store.recheck()
        assert cache.stats().damaged == 0


def test_followers_leave_it_out_too(location: str | Path) -> None:
    writer, follower = opened(location), opened(location)
    for number in range(4):
        writer.put(row(number))
    writer.flush()
    flip(location, 2)
    assert [one.sequence for one in follower.poll(process=2)] == [0, 2, 3]
    assert (follower.last_id, follower.damaged, follower.poll(process=2)) == (4, 1, [])
    writer.close()
    follower.close()


def test_many_bad_rows(location: str | Path) -> None:
    fill(location, 700)
    execute(location, "UPDATE sequences SET token_count = token_count + 1000000 WHERE id % 2 = 0 OR id < 100")
    store = opened(location)
    assert [one.sequence for one in store.records()] == [n for n in range(100, 700) if n % 2 == 0]
    assert store.damaged == 700 - 300
    store.close()


@pytest.mark.parametrize(
    "change",
    [
        "tokens = CAST('text' AS TEXT)",
        "token_count = 'many'",
        "created_at = 'yesterday'",
        "tenant = CAST(x'ff00fe' AS TEXT)",
        "session = x'00ff'",
        "namespace = 5",
        "number = 'abc'",
        "created_at = 9e999",
    ],
)
def test_any_value_in_any_column(tmp_path: Path, change: str) -> None:
    """SQLite keeps what it finds, whatever the column's type."""
    fill(tmp_path, 300)
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
        connection.execute(f"UPDATE sequences SET {change} WHERE id = 77")
        connection.commit()
    with SuffixCache.open(tmp_path) as cache:
        assert cache.stats().sequences == 299
        assert cache.stats().damaged == ("namespace" not in change)  # no namespace looks for that one
        cache.compact()
        cache.forget(tenant="t1")
        cache.forget(text="xyz", decode=str)
    store = opened(tmp_path)
    assert len(list(store.records())) in (199, 200)
    store.close()


def leaves(folder: Path) -> Iterator[int]:
    """Where the pages of the table's rows lie in the file."""
    with closing(sqlite3.connect(folder / DATABASE)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        [size] = connection.execute("PRAGMA page_size").fetchone()
        try:
            query = "SELECT pageno FROM dbstat WHERE name = 'sequences' AND pagetype = 'leaf' ORDER BY pageno"
            pages = connection.execute(query).fetchall()
        except sqlite3.OperationalError:
            pytest.skip("SQLite was built without dbstat")
    yield from ((page - 1) * size for (page,) in pages)


def test_a_page_that_is_no_page_costs_its_rows(tmp_path: Path) -> None:
    fill(tmp_path)
    at = list(leaves(tmp_path))
    with (tmp_path / DATABASE).open("r+b") as file:
        file.seek(at[len(at) // 2])
        file.write(b"\xff" * 64)
    store = opened(tmp_path)
    found = [one.sequence for one in store.records()]
    assert ROWS - 100 < len(found) < ROWS and len(found) + store.damaged == ROWS
    newest = [one.sequence for there in store.namespaces() for one in store.newest(there.namespace)]
    assert ROWS - 100 < len(newest) < ROWS and len(set(newest) ^ set(found)) <= 1  # a row at the edge of the page
    assert [problem for problem in store.problems() if "sequence" in problem]
    store.close()
    with SuffixCache.open(tmp_path) as cache:
        assert abs(cache.stats().sequences - len(newest)) <= 1


def test_it_is_read_in_pieces(location: str | Path) -> None:
    fill(location, 3 * PIECE + 7)
    store = opened(location)
    for newest_first in (False, True):
        pages = RowPages(store._database, (), 0, 10**9, lost=lambda *_: None, newest_first=newest_first)
        pieces = [[one.id for one in piece] for piece in pages]
        assert [len(piece) for piece in pieces] == [PIECE] * 3 + [7]
        ids = [one for piece in pieces for one in piece]
        assert ids == sorted(ids, reverse=newest_first)
    store.close()


def test_the_hottest_come_first_and_only_a_tenants(location: str | Path) -> None:
    fill(location, 30)
    store = opened(location)
    store.put_usage([(3, 1), (6, 5), (1, 9)], {})
    store.flush()
    mine = Namespace("t0").tokenizer_hash
    assert [one.sequence for one in store.hottest("t0", mine, 20 * 4)] == [6, 3, 27, 24]
    assert [one.sequence for one in store.hottest("t1", mine, 59)] == [1, 28]
    assert store.hottest("t0", "other", 10**9) == store.hottest("nobody", mine, 10**9) == []
    store.close()


def test_namespaces_are_told_by_their_totals(location: str | Path) -> None:
    fill(location, 30)
    store = opened(location)
    assert {(one.namespace.tenant, one.sequences, one.tokens) for one in store.namespaces()} == {
        ("t0", 10, 200),
        ("t1", 10, 200),
        ("t2", 10, 200),
    }
    with store._database.engine.connect() as connection:
        [size] = connection.execute(sa.select(sa.func.sum(sequences.c.size))).one()
    assert sum(one.bytes for one in store.namespaces()) == size
    store.position()
    assert [one.sequence for one in islice(store.newest(Namespace("t1")), 3)] == [28, 25, 22]
    assert [one.sequence for one in store.newest(Namespace("t1"), beyond=24)] == [28, 25]
    assert list(store.newest(Namespace("nobody"))) == []
    assert store.stored(Namespace("t1"), [28, 22, 1000, *range(2000, 2000 + 2 * PIECE), 25]) == {22, 25, 28}
    assert store.stored(Namespace("t1"), []) == set()
    assert store.learned_of(Namespace("t1")) is None
    execute(location, "DELETE FROM sequences WHERE tenant = 't1' OR number = 3")
    assert {(one.namespace.tenant, one.sequences) for one in store.namespaces()} == {("t0", 9), ("t2", 10)}
    execute(location, "DELETE FROM sequences")
    with store._database.engine.connect() as connection:
        assert connection.execute(sa.select(namespaces)).all() == []
    store.close()


def test_a_reader_tells_how_far_behind_it_is(location: str | Path) -> None:
    fill(location, 10)
    reader, writer = opened(location), opened(location)
    reader.position()
    for number in range(100, 100 + 2 * PIECE):
        writer.put(row(number))
    writer.flush()
    began = time.monotonic()
    lag, unread = reader.behind, 2 * PIECE
    while unread:
        assert reader.behind >= lag
        assert len(reader.poll(None)) == POLLED
        unread -= POLLED
        assert reader.unread == unread
    assert reader.behind <= time.monotonic() - began
    reader.close()
    writer.close()


def test_a_server_that_is_away_is_no_damage(server: object, postgres: str) -> None:
    fill(postgres, 10)
    store = opened(postgres)
    server.stop()  # type: ignore[attr-defined]
    try:
        with pytest.raises(CacheUnavailableError):
            list(store.records())
    finally:
        server.start()  # type: ignore[attr-defined]
    assert store.damaged == 0
    store.close()
