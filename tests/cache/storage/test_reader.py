"""A row that cannot be read is left out, counted and told of once; everything else goes on."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from agentspec.cache import SuffixCache
from agentspec.cache.storage.reader import PIECE, POLLED
from agentspec.cache.storage.schema import namespaces, sequences
from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.cache.storage.sqlite import DATABASE
from agentspec.cache.tokens import SequenceRecord
from agentspec.errors import CacheUnavailableError
from agentspec.types import Namespace

ROWS = 1000


def row(number: int, tenant: str = "t") -> SequenceRecord:
    tokens = np.random.default_rng(number).integers(0, 2**31 - 2, 20).astype(np.int32)
    return SequenceRecord(number, Namespace(tenant), f"s{number}", tokens, tokens[:5], 12.5)


def opened(location: str | Path) -> SequenceStore:
    return SequenceStore.open(location, disk_bytes=None, mode="follower")


def fill(location: str | Path, count: int = ROWS, first: int = 0) -> None:
    store = opened(location)
    for number in range(first, first + count):
        store.put(row(number, f"t{number % 3}"))
    store.flush()
    store.close()


def execute(location: str | Path, statement: str, *values: object) -> None:
    store = opened(location)
    with store._database.writing() as connection:
        connection.execute(sa.text(statement), dict(zip("abc", values, strict=False)))
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


def test_all_pieces_are_read_in_order(location: str | Path) -> None:
    for count in (3 * PIECE, 3 * PIECE + 7):
        fill(location, count - len(numbers(location)), len(numbers(location)))
        assert numbers(location) == list(range(count))
        with closing(opened(location)) as store:
            assert [one.sequence for one in store.newest(Namespace("t1"))] == list(range(count))[1::3][::-1]


def numbers(location: str | Path) -> list[int]:
    with closing(opened(location)) as store:
        return [one.sequence for one in store.records()]


def test_namespaces_are_told_by_their_totals(location: str | Path) -> None:
    fill(location, 30)
    store = opened(location)
    assert [one.tenant for one in store.namespaces()] == ["t0", "t1", "t2"]
    with store._database.engine.connect() as connection:
        [size] = connection.execute(sa.select(sa.func.sum(sequences.c.size))).one()
        totals = sa.select(namespaces.c.tenant, namespaces.c.sequences, namespaces.c.tokens, namespaces.c.bytes)
        found = connection.execute(totals).all()
    assert {row[:3] for row in found} == {("t0", 10, 200), ("t1", 10, 200), ("t2", 10, 200)}
    assert sum(row.bytes for row in found) == size
    store.position()
    assert [one.sequence for one in islice(store.newest(Namespace("t1")), 3)] == [28, 25, 22]
    assert [one.sequence for one in store.newest(Namespace("t1"), beyond=24)] == [28, 25]
    assert list(store.newest(Namespace("nobody"))) == []
    assert store.stored([28, 22, 1000, *range(2000, 2000 + 2 * PIECE), 25]) == {22, 25, 28}
    assert store.stored([]) == set()
    execute(location, "DELETE FROM sequences WHERE tenant = 't1' OR number = 3")
    assert [one.tenant for one in store.namespaces()] == ["t0", "t2"]
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


def test_many_bad_rows(location: str | Path) -> None:
    fill(location, 700)
    execute(location, "UPDATE sequences SET token_count = token_count + 1000000 WHERE id % 2 = 0 OR id < 100")
    store = opened(location)
    assert [one.sequence for one in store.records()] == [n for n in range(100, 700) if n % 2 == 0]
    assert store.damaged == 700 - 300
    store.close()
