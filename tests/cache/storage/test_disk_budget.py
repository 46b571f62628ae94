from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.cache.storage.sqlite import DATABASE
from agentspec.cache.tokens import SequenceRecord, Tokens
from agentspec.types import Namespace


def row(number: int, tokens: object, context: object = ()) -> SequenceRecord:
    arrays = [np.asarray(part, dtype=np.int32) for part in (tokens, context)]
    return SequenceRecord(number, Namespace("t", "m", "k", "c"), "s", arrays[0], arrays[1], 12.5)


def text(seed: int, length: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 2**31 - 1, length).astype(np.int32)


def opened(location: str | Path, disk_bytes: int | None = None, tenant_disk_bytes: int | None = None) -> SequenceStore:
    return SequenceStore.open(location, disk_bytes=disk_bytes, tenant_disk_bytes=tenant_disk_bytes, mode="auto")


def budget(location: str | Path, size: int) -> int:
    """A limit that leaves about `size` bytes for rows: the partitions of PostgreSQL take some when they are empty."""
    return size + (800_000 if isinstance(location, str) else 0)


def execute(location: str | Path, *statements: str) -> list[tuple[object, ...]]:
    """The rows of the last statement."""
    engine = sa.create_engine(location if isinstance(location, str) else f"sqlite:///{location / DATABASE}")
    with engine.begin() as connection:
        results = [connection.exec_driver_sql(statement) for statement in statements]
        rows = [tuple(row) for row in results[-1]] if results[-1].returns_rows else []
    engine.dispose()
    return rows


@pytest.mark.parametrize("location", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)], indirect=True)
def test_the_database_stays_within_its_budget(location: str | Path) -> None:
    limit = budget(location, 600_000)
    store = opened(location, disk_bytes=limit)
    for number in range(300):
        store.put(row(number, text(number, 2000)))
        if number % 10 == 0:
            store.flush()
    store.flush()
    assert store.disk_bytes() <= limit
    kept = [r.sequence for r in store.records()]
    store.close()
    assert kept == list(range(kept[0], 300))  # the oldest went
    assert len(kept) > 20


def test_a_tenant_over_its_share_loses_its_own_oldest(location: str | Path) -> None:
    limit = 200_000
    store = opened(location, tenant_disk_bytes=limit)
    for number in range(200):
        for tenant in ("flood", "quiet") if number < 20 else ("flood",):
            store.put(
                replace(
                    row(number + (0 if tenant == "flood" else 1000), text(number, 500)), namespace=Namespace(tenant)
                )
            )
    store.flush()
    taken = 0

    def over() -> bool:
        nonlocal taken
        store.enforce_budget()
        query = "SELECT tenant, sum(length(tokens)), count(*), min(number), max(number) FROM sequences GROUP BY tenant"
        sums = {str(tenant): tuple(rest) for tenant, *rest in execute(location, query)}
        assert sums["quiet"][1:] == (20, 1000, 1019)
        taken, count, first, last = sums["flood"]
        assert (last, last - first + 1) == (199, count)  # the oldest went
        return int(taken) > limit

    deadline = time.monotonic() + 60
    while over():
        assert time.monotonic() < deadline
    assert taken > limit // 2
    store.close()


def test_the_largest_tenant_makes_room_for_all(location: str | Path) -> None:
    store = opened(location, disk_bytes=budget(location, 600_000))
    for number in range(150):
        tenant = "quiet" if number < 10 else "flood"
        store.put(replace(row(number, text(number, 2000)), namespace=Namespace(tenant)))
        if number % 10 == 9:
            store.flush()
    kept = [r.sequence for r in store.records()]
    store.close()
    assert kept[:10] == list(range(10))
    assert 20 < len(kept) < 150


def test_a_tiny_budget_keeps_nothing_and_goes_on(location: str | Path) -> None:
    store = opened(location, disk_bytes=1)
    store.put(row(1, text(1, 2000)))
    store.flush()
    assert list(store.records()) == []
    store.close()


@pytest.mark.slow
def test_nothing_is_deleted_while_a_reader_keeps_its_room_from_being_returned(tmp_path: Path) -> None:
    """Deleting more would not make the files smaller either."""
    store = opened(tmp_path, disk_bytes=200_000)
    with closing(sqlite3.connect(tmp_path / DATABASE)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM sequences").fetchone()
        store._database.engine.dispose()
        for number in range(60):
            store.put(row(number, text(number, 2000)))
        store.flush()
        assert execute(tmp_path, "SELECT count(*) FROM sequences") == [(60,)]
    store.enforce_budget()
    assert store.disk_bytes() <= 200_000
    assert execute(tmp_path, "SELECT count(*) > 10 FROM sequences") == [(1,)]
    store.close()


def test_a_follower_leaves_it_to_the_writer(location: str | Path) -> None:
    writer = opened(location, disk_bytes=budget(location, 400_000))
    follower = opened(location, disk_bytes=budget(location, 400_000))
    for number in range(60):
        follower.put(row(number, text(number, 4000)))
    follower.flush()
    assert follower.disk_bytes() > 400_000
    assert len(list(follower.records())) == 60
    writer.enforce_budget()
    assert writer.disk_bytes() <= budget(location, 400_000)
    assert 5 < len(list(follower.records())) < 60
    follower.close()
    writer.close()


@pytest.mark.parametrize("name", ["X'ff01'", "'other'"])
@pytest.mark.parametrize("share", [None, 200_000])
def test_a_damaged_total_lets_writing_and_the_budgets_be(tmp_path: Path, name: str, share: int | None) -> None:
    with closing(opened(tmp_path)) as store:
        store.put(replace(row(0, text(0, 60_000)), namespace=Namespace("damaged")))
        store.flush()
    execute(tmp_path, f"UPDATE namespaces SET tenant = {name}")
    limit = 500_000
    with closing(opened(tmp_path, disk_bytes=limit, tenant_disk_bytes=share)) as store:
        for number in range(1, 12):
            store.put(row(number, text(number, 10_000)))
            store.flush()
        store.enforce_budget()
        assert store.disk_bytes() <= limit
