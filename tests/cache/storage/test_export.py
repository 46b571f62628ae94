from __future__ import annotations

import json
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.cache import SuffixCache
from agentspec.cache.storage.export import add, identity, parse, write
from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.cache.tokens import SequenceRecord
from agentspec.errors import ConfigurationError
from agentspec.types import Labels, Namespace
from tests.conftest import costly

NAMES = st.none() | st.text(max_size=5)
TOKENS = st.lists(st.integers(0, 2**31 - 2), max_size=64).map(lambda ids: np.array(ids, dtype=np.int32))
ROWS = st.builds(
    SequenceRecord,
    sequence=st.just(0),
    namespace=st.builds(Namespace, *[st.text(max_size=5)] * 4),
    labels=st.builds(Labels, NAMES, NAMES, NAMES),
    tokens=TOKENS.filter(len),
    context=TOKENS,
    created_at=st.floats(0, 4e9),
)


def row(*tokens: int, session: str | None = "s", tenant: str = "t") -> SequenceRecord:
    return SequenceRecord(
        0, Namespace(tenant), Labels(session), np.array(tokens, np.int32), np.array([1], np.int32), 5.0
    )


def read(path: Path) -> list[SequenceRecord]:
    rows = [parse(line, f"{path}:{number}") for number, line in enumerate(path.read_bytes().splitlines(), 1)]
    return [row for row in rows if row is not None]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SequenceStore]:
    store = SequenceStore.open(tmp_path / "cache", disk_bytes=None, mode="follower")
    yield store
    store.close()


def told(rows: list[SequenceRecord]) -> list[tuple[bytes, float]]:
    return sorted((identity(row), row.created_at) for row in rows)


@given(st.lists(ROWS, max_size=5))
def test_what_is_written_is_read(tmp_path: Path, rows: list[SequenceRecord]) -> None:
    assert write(tmp_path / "f.jsonl", rows) == len(rows)
    assert told(read(tmp_path / "f.jsonl")) == told(rows)


@costly
@given(st.lists(ROWS, max_size=4), st.lists(ROWS, max_size=3))
def test_adding_again_adds_nothing(
    tmp_path_factory: pytest.TempPathFactory, rows: list[SequenceRecord], more: list[SequenceRecord]
) -> None:
    rows = [*rows, *rows[:1]]  # what was said twice
    store = SequenceStore.open(tmp_path_factory.mktemp("cache"), disk_bytes=None, mode="follower")
    try:
        assert add(store, rows) == (len(rows), 0)
        assert add(store, rows[::-1]) == (0, len(rows))
        new = [other for other in more if identity(other) not in {identity(known) for known in rows}]
        assert add(store, [*new, *rows]) == (len(new), len(rows))
        assert told(list(store.records())) == told([*rows, *new])
        assert len({row.sequence for row in store.records()}) == len(rows) + len(new)
    finally:
        store.close()


def test_everything_that_tells_sequences_apart_does() -> None:
    one = row(1, 2)
    others = [
        row(1, 2, 3),
        row(1, 2, session=None),
        row(1, 2, session=""),
        row(1, 2, tenant="u"),
        replace(one, labels=Labels("s", "w")),
        replace(one, labels=Labels("s", None, "w")),
        replace(one, context=np.array([1, 1], np.int32), tokens=np.array([2], np.int32)),
    ]
    assert len({identity(other) for other in [one, *others]}) == 8
    assert identity(replace(one, sequence=7, created_at=1.0)) == identity(one)


def test_added_sequences_are_drafted(store: SequenceStore, tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path / "cache", namespace="t") as cache:
        add(store, [row(10, 11, 12, 13)])
        until = time.monotonic() + 30
        while not cache.stats().sequences and time.monotonic() < until:
            time.sleep(0.05)  # it looks for what others added twice a second
        with cache.request([7, 10, 11]) as request:
            assert request.draft(8).tokens.tolist()[:2] == [12, 13]


def test_an_export_is_its_owners_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text("before")

    def breaks() -> Iterator[SequenceRecord]:
        yield row(1)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write(path, breaks())
    assert path.read_text() == "before" and [file.name for file in tmp_path.iterdir()] == ["f.jsonl"]
    write(path, [row(1)])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ConfigurationError, match="cannot write"):
        write(tmp_path / "absent" / "f.jsonl", [])


GOOD = {"namespace": {"tenant": "t"}, "session": None, "workflow": None, "step": None, "created_at": 1, "context": []}


@pytest.mark.parametrize(
    "record",
    [
        [],
        {},
        {"agentspec_export": 2},
        GOOD,
        GOOD | {"tokens": []},
        GOOD | {"tokens": [-1]},
        GOOD | {"tokens": [2**31]},
        GOOD | {"tokens": ["1"]},
        GOOD | {"tokens": [1], "context": [1] * 65},
        GOOD | {"tokens": [1], "session": 5},
        GOOD | {"tokens": [1], "namespace": {"tenant": 5}},
        GOOD | {"tokens": [1], "namespace": {"tenant": "t", "other": "x"}},
        GOOD | {"tokens": [1], "namespace": {"tenant": None}},
        GOOD | {"tokens": [1], "created_at": "then"},
        GOOD | {"tokens": [1], "created_at": float("nan")},
        GOOD | {"tokens": [1], "created_at": float("inf")},
    ],
)
def test_a_line_that_is_no_sequence_is_named(record: object) -> None:
    parse(json.dumps(GOOD | {"tokens": [1]}).encode(), "f:1")
    with pytest.raises(ConfigurationError, match="f:3: "):
        parse(json.dumps(record).encode(), "f:3")
