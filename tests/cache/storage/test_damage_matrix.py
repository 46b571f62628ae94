"""Every kind of damage to a row, on both databases: whatever is done with the cache goes on with all other rows."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from agentspec.cache import SuffixCache
from agentspec.cache.check import verify
from agentspec.cache.record import SequenceRecord
from agentspec.cache.storage.export import write
from agentspec.cache.storage.schema import meta, sequences
from agentspec.cache.storage.schema import namespaces as totals
from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.errors import CacheFormatError
from agentspec.types import Labels, Namespace

ROWS, BAD, GOOD = 12, 7, 10  # ids 1 to 12; of tenant "t0" are 1, 4, 7 and 10

Row = dict[str, Any]


def record(number: int) -> SequenceRecord:
    tokens = (1000 * number + np.arange(30)).astype(np.int32)
    return SequenceRecord(number, Namespace(f"t{number % 3}"), Labels(f"s{number}"), tokens, tokens[:0], 12.5)


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
    filled: str | Path, follower: SuffixCache, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(filled, kind)
    assert drafts(follower, GOOD)
    with caplog.at_level(logging.CRITICAL), SuffixCache.open(filled) as cache:
        assert drafts(cache, GOOD) and not drafts(cache, BAD)
        assert cache.stats().store_error is None
        assert cache.stats().damaged == (kind != "a namespace of nobody")  # which no namespace looks for
        cache.flush()
    with closing(opened(filled)) as store:
        assert write(tmp_path / "export", store.records()) == ROWS - 1
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
