"""SQLite keeps any value in any column: whatever a damaged row holds, forgetting and opening go on."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing, nullcontext, suppress
from pathlib import Path

import pytest

from agentspec.cache import SuffixCache
from agentspec.cache.responses import StoredResponse
from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.cache.storage.sqlite import DATABASE, STATE
from agentspec.cache.tool_turns import new_turn
from agentspec.errors import CacheError, CacheFormatError

BYTES, HUGE = b"\xff\xfe\x00", 2**62
DAMAGES = [
    ("sequences", "namespace", BYTES),
    ("sequences", "tenant", BYTES),
    ("learned", "state", "text"),
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


def damage(folder: Path, table: str, column: str, value: object) -> None:
    with closing(sqlite3.connect(place(folder, table))) as connection:
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = (SELECT min(rowid) FROM {table})", (value,))
        connection.commit()


def count(folder: Path, table: str) -> int:
    with closing(sqlite3.connect(place(folder, table))) as connection:
        [found] = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
        return int(found)


@pytest.mark.parametrize(
    ("table", "column", "value"),
    DAMAGES[::6] + [pytest.param(*one, marks=pytest.mark.slow) for place, one in enumerate(DAMAGES) if place % 6],
)
def test_forgetting_goes_on(tmp_path: Path, table: str, column: str, value: object) -> None:
    fill(tmp_path)
    damage(tmp_path, table, column, value)
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
        damage(tmp_path, table, "created_at", "yesterday")
    with SuffixCache.open(tmp_path) as cache:
        cache.forget(older_than=3600.0)
    assert (count(tmp_path, "sequences"), count(tmp_path, "responses"), count(tmp_path, "tool_turns")) == (3, 1, 1)


def test_a_damaged_answer_is_told(tmp_path: Path) -> None:
    fill(tmp_path)
    damage(tmp_path, "responses", "body", 5)
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
        damage(tmp_path, "deletions", column, value)
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
    damage(tmp_path, "sequences", "size", "small")
    store = SequenceStore.open(tmp_path, disk_bytes=None, tenant_disk_bytes=1100, mode="writer")
    store.enforce_budget()
    store.close()
    assert 0 < count(tmp_path, "sequences") <= 2
