"""Damaged rows and values: whatever is done with the cache goes on with all other rows."""

from __future__ import annotations

import logging
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from agentspec.cache import SuffixCache
from agentspec.cache.storage.schema import meta, sequences
from agentspec.cache.storage.schema import namespaces as totals
from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.cache.storage.sqlite import DATABASE, STATE
from agentspec.cache.stored import StoredResponse, new_turn
from agentspec.cache.tokens import SequenceRecord
from agentspec.cli.cache import problems_of as verify
from agentspec.errors import CacheError, CacheFormatError
from agentspec.types import Namespace

ROWS, BAD, GOOD = 12, 7, 10  # ids 1 to 12; of tenant "t0" are 1, 4, 7 and 10


Row = dict[str, Any]


def record(number: int) -> SequenceRecord:
    tokens = (1000 * number + np.arange(30)).astype(np.int32)
    return SequenceRecord(number, Namespace(f"t{number % 3}"), f"s{number}", tokens, tokens[:0], 12.5)


def opened(location: str | Path) -> SequenceStore:
    return SequenceStore.open(location, disk_bytes=None, mode="follower")


def flipped(row: Row) -> Row:
    data = bytearray(row["tokens"])
    data[len(data) // 2] ^= 4
    return {"tokens": bytes(data)}


DAMAGES: dict[str, Callable[[Row], Row]] = {
    "a flipped bit": flipped,
    "a truncated array": lambda row: {"tokens": row["tokens"][: len(row["tokens"]) // 2]},
    "no array": lambda row: {"tokens": b""},
    "a length of too many tokens": lambda row: {"token_count": row["token_count"] + 100_000},
    "a negative length": lambda row: {"token_count": -1},
    "another tenant": lambda row: {"tenant": "t1"},
    "another namespace": lambda row: {"namespace": Namespace("t1").key},
    "a namespace of nobody": lambda row: {"namespace": "x" * 64},
    "tokens that are none": lambda row: {"tokens": zlib.compress(np.full(30, -5, "<i4").tobytes())},
    "half a token": lambda row: {"tokens": zlib.compress(bytes(4 * 30 + 2))},
    "another compression, as of a later version": lambda row: {"tokens": b"\x28\xb5\x2f\xfd" + row["tokens"]},
    "an impossible age": lambda row: {"created_at": float("inf")},
}


QUICK = ("a flipped bit",)


@pytest.fixture
def filled(location: str | Path) -> str | Path:
    with closing(opened(location)) as store:
        for number in range(ROWS):
            store.put(record(number))
        store.flush()
    return location


def damage(location: str | Path, kind: str) -> None:
    with closing(opened(location)) as store, store.database.writing() as connection:
        mine = sequences.c.id == BAD
        row = connection.execute(sa.select(sequences).where(mine)).one()._asdict()
        connection.execute(sequences.update().where(mine).values(**DAMAGES[kind](row)))


def drafts(cache: SuffixCache, id_: int) -> bool:
    """Whether the cache knows how the sequence of a row goes on."""
    text = record(id_ - 1).tokens
    with cache.request(text[:5], namespace=Namespace(f"t{(id_ - 1) % 3}"), store=False) as request:
        return bool(np.array_equal(request.draft(8).tokens, text[5:13]))


@pytest.fixture
def follower(filled: str | Path) -> Iterator[SuffixCache]:
    """A process that was there before the damage."""
    with SuffixCache.open(filled, mode="follower") as cache:
        yield cache


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in DAMAGES]
)
def test_everything_goes_on(
    filled: str | Path, follower: SuffixCache, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(filled, kind)
    assert drafts(follower, GOOD)
    with caplog.at_level(logging.CRITICAL), SuffixCache.open(filled) as cache:
        assert drafts(cache, GOOD) and not drafts(cache, BAD)
        assert cache.stats().store_error is None
        assert cache.stats().damaged == (kind != "a namespace of nobody")  # which no namespace looks for
        cache.flush()
    with closing(opened(filled)) as store:
        assert len(list(store.records())) == ROWS - 1
        [problem] = verify(filled, 1 << 20)
        assert f"sequence {BAD}" in problem
    with SuffixCache.open(filled) as cache:
        assert cache.forget(session="s0") == 1
        assert cache.forget(tenant="t2") == ROWS // 3
    assert len(verify(filled, 1 << 20)) == 1
    with SuffixCache.open(filled) as cache:
        assert drafts(cache, GOOD) and not drafts(cache, BAD)
    assert drafts(follower, GOOD)


@pytest.mark.parametrize("kind", ["another tenant", "another namespace"])
@pytest.mark.parametrize("tenant", ["t0", "t1"])
def test_a_row_whose_names_disagree_is_forgotten_with_either_tenant(filled: str | Path, kind: str, tenant: str) -> None:
    damage(filled, kind)
    others = ROWS // 3 + ROWS // 3
    with SuffixCache.open(filled) as cache:
        assert cache.forget(tenant=tenant) in {ROWS // 3, ROWS // 3 + 1}
        assert cache.forget(tenant=tenant) == 0
    with closing(opened(filled)) as store, store.database.engine.connect() as connection:
        left = set(connection.execute(sa.select(sequences.c.id)).scalars())
        assert BAD not in left and others - 1 <= len(left) <= others
    assert verify(filled, 1 << 20) == []


def test_a_damaged_total_deletes_nothing_of_another_tenant(filled: str | Path) -> None:
    with closing(opened(filled)) as store, store.database.writing() as connection:
        connection.execute(totals.update().where(totals.c.tenant == "t1").values(tenant="t0"))
    with SuffixCache.open(filled) as cache:
        assert cache.forget(tenant="t0") == ROWS // 3
        assert drafts(cache, 2)


def test_a_namespace_without_its_totals_is_loaded_when_it_is_used(filled: str | Path) -> None:
    with closing(opened(filled)) as store, store.database.writing() as connection:
        connection.execute(totals.delete().where(totals.c.tenant == "t0"))
    with SuffixCache.open(filled) as cache:
        assert cache.stats().store_error is None
        assert drafts(cache, 2)
        assert cache.forget(tenant="t0") == ROWS // 3
    assert verify(filled, 1 << 20) == []


def test_another_version_is_left_alone(filled: str | Path) -> None:
    with closing(opened(filled)) as store, store.database.writing() as connection:
        connection.execute(meta.update().values(value="999"))
    for mode in ("auto", "writer", "follower"):
        with pytest.raises(CacheFormatError, match="of version 999"):
            SuffixCache.open(filled, mode=mode)
    [problem] = verify(filled, 1 << 20)
    assert "of version 999" in problem
    with pytest.raises(CacheFormatError):
        opened(filled)


BYTES, HUGE = b"\xff\xfe\x00", 2**62


VALUES = [
    ("sequences", "namespace", BYTES),
    ("sequences", "tenant", BYTES),
    ("namespaces", "tenant", BYTES),
    ("responses", "session", BYTES),
    ("responses", "created_at", "text"),
    ("responses", "body", HUGE),
    ("tool_turns", "agent", BYTES),
    ("tool_turns", "created_at", BYTES),
    ("tool_turns", "size", float("inf")),
    ("tool_turns", "body", HUGE),
]


def fill(folder: Path) -> None:
    with SuffixCache.open(folder) as cache:
        for number in range(4):
            with cache.request([1, 2], session=f"s{number}") as request:
                request.extend([10 * number + 1, 10 * number + 2, 10 * number + 3])
        for number in range(2):
            cache.responses.put(StoredResponse(f"r{number}", "default", time.time(), session="s1", response={"id": 1}))
            cache.tool_turns.put(new_turn("default", "agent", "s1", "{}"))


def place(folder: Path, table: str) -> Path:
    return folder / (STATE if table in ("responses", "tool_turns") else DATABASE)


def change(folder: Path, table: str, column: str, value: object) -> None:
    with closing(sqlite3.connect(place(folder, table))) as connection:
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = (SELECT min(rowid) FROM {table})", (value,))
        connection.commit()


def count(folder: Path, table: str) -> int:
    with closing(sqlite3.connect(place(folder, table))) as connection:
        [found] = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
        return int(found)


@pytest.mark.parametrize(
    ("table", "column", "value"),
    VALUES[::6] + [pytest.param(*one, marks=pytest.mark.slow) for place, one in enumerate(VALUES) if place % 6],
)
def test_forgetting_goes_on(tmp_path: Path, table: str, column: str, value: object) -> None:
    fill(tmp_path)
    change(tmp_path, table, column, value)
    with SuffixCache.open(tmp_path) as cache:
        assert cache.forget(session="s2") == 1
        assert cache.forget(text="nowhere", decode=str) == (table == "sequences")  # what cannot be searched goes
        cache.tool_turns.maintain()
        cache.responses.maintain()
        cache.flush()
        cache.forget(older_than=0.0)
    assert (count(tmp_path, "sequences"), count(tmp_path, "responses"), count(tmp_path, "tool_turns")) == (0, 0, 0)


def test_a_damaged_age_does_not_outlive_a_term(tmp_path: Path) -> None:
    fill(tmp_path)
    for table in ("sequences", "responses", "tool_turns"):
        change(tmp_path, table, "created_at", "yesterday")
    with SuffixCache.open(tmp_path) as cache:
        cache.forget(older_than=3600.0)
    assert (count(tmp_path, "sequences"), count(tmp_path, "responses"), count(tmp_path, "tool_turns")) == (3, 1, 1)


def test_a_damaged_answer_is_told(tmp_path: Path) -> None:
    fill(tmp_path)
    change(tmp_path, "responses", "body", 5)
    with SuffixCache.open(tmp_path) as cache:
        with pytest.raises(CacheFormatError, match="r0 is damaged"):
            cache.responses.get("default", "r0")
        assert cache.responses.get("default", "r1") is not None


@pytest.mark.parametrize(
    ("column", "value"),
    [("before", "soon")]
    + [
        pytest.param(*one, marks=pytest.mark.slow)
        for one in [("before", BYTES), ("session", 5), ("searched", "maybe"), ("created_at", "then")]
    ],
)
def test_a_damaged_deletion_holds_up_nothing(tmp_path: Path, column: str, value: object) -> None:
    """Neither the process that learns of it nor one that opens a segment of the time before."""
    fill(tmp_path)
    with SuffixCache.open(tmp_path, mode="writer") as cache:
        cache.compact()
        segment = next(tmp_path.glob("*.segment"))
        kept = segment.read_bytes()
        cache.forget(session="s3")
    segment.write_bytes(kept)  # as by a process that was killed in between
    with SuffixCache.open(tmp_path, mode="follower") as follower:
        assert follower._store is not None
        follower._store.last_deletion = 0
        change(tmp_path, "deletions", column, value)
        for first in (71, 81):  # the first may be what was deleted, for all that is known
            with follower.request([1, 2]) as request:
                request.extend([first, first + 1, first + 2])
            with suppress(CacheError) if first == 71 else nullcontext():
                follower.flush()
            follower._deleter.apply_deletions()
        assert follower.stats().store_error is None
        follower.tool_turns.put(new_turn("default", "agent", "s1", "{}"))
        follower.tool_turns.flush()
    assert count(tmp_path, "sequences") in (4, 5) and count(tmp_path, "tool_turns") == 3
    with SuffixCache.open(tmp_path) as cache, cache.request([1, 2], store=False) as request:
        drafted = request.draft(8).tokens.tolist()
        assert 81 in drafted and 31 not in drafted


def test_a_damaged_size_is_no_reason_to_keep_more_than_the_budget(tmp_path: Path) -> None:
    fill(tmp_path)
    change(tmp_path, "sequences", "size", "small")
    store = SequenceStore.open(tmp_path, disk_bytes=None, tenant_disk_bytes=1100, mode="writer")
    store.enforce_budget()
    store.close()
    assert 0 < count(tmp_path, "sequences") <= 2
