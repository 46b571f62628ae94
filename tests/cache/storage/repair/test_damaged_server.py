"""A damaged page of a PostgreSQL table, which the server alone can mend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from agentspec.cache import SuffixCache
from agentspec.cache.deletion import PartlyForgottenError, select
from agentspec.cache.record import SequenceRecord
from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.types import Labels, Namespace

ROWS, PAGE = 120, 8192


def record(number: int) -> SequenceRecord:
    tokens = np.random.default_rng(number).integers(0, 50_000, 60).astype(np.int32)
    return SequenceRecord(number, Namespace("t"), Labels(f"s{number % 2}"), tokens, tokens[:0], 12.5)


def opened(address: str) -> SequenceStore:
    return SequenceStore.open(address, disk_bytes=None, mode="follower")


@pytest.fixture
def damaged(server: Any, postgres: str) -> Iterator[str]:
    """A database whose pages a test damages: gone after it, since `ANALYZE` of all tables would fail."""
    yield postgres
    server.execute(f"DROP SCHEMA {postgres.rpartition('%3D')[2]} CASCADE")


@pytest.mark.slow
def test_what_can_be_read_is_forgotten_and_the_rest_is_told(server: Any, damaged: str) -> None:
    with closing(opened(damaged)) as store:
        for number in range(ROWS):
            store.put(record(number))
        store.flush()
        with store.database.engine.connect() as connection:
            place = sa.text("SELECT DISTINCT pg_relation_filepath(tableoid) FROM sequences")
            [file] = connection.execute(place).scalars()
            query = sa.text("SELECT count(*) FROM sequences WHERE (ctid::text::point)[0] = 1")
            lost = connection.execute(query).scalar_one()
    server.stop()
    with (server.folder / file).open("r+b") as data:
        data.seek(PAGE)
        data.write(b"\xa5" * PAGE)
    server.start()
    assert 0 < lost < ROWS // 2
    with closing(opened(damaged)) as store:
        assert len(list(store.records())) == ROWS - lost == ROWS - store.damaged
        assert store.remove(store.unreadable()) == 0
    with SuffixCache.open(damaged, mode="follower") as cache:
        with pytest.raises(PartlyForgottenError, match=f"{lost} rows may be left") as told:
            cache.forget(session="s1")
        assert abs(told.value.count - (ROWS - lost) // 2) <= 1
        with pytest.raises(PartlyForgottenError) as told:
            cache.forget(session="s1")
        assert told.value.count == 0
    with closing(opened(damaged)) as store:
        with pytest.raises(PartlyForgottenError):  # of age, and nothing new is written each time
            store.expire(select(session="s1", older_than=1.0))
        left = list(store.records())
        assert {record.labels.session for record in left} == {"s0"} and len(store.deletions_since(0)) == 2
