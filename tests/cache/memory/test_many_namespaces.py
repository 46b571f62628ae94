"""Ten thousand namespaces: what opening, loading and looking after them costs is counted, not timed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from sqlalchemy import event

from agentspec.cache import SuffixCache, namespaces
from agentspec.cache.partition import Partition
from agentspec.cache.record import SequenceRecord
from agentspec.cache.storage import codec
from agentspec.cache.storage.schema import learned, sequences
from agentspec.cache.storage.segment_folder import LocalFiles
from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.cache.sync import StoreSync
from agentspec.cache.tokens import Tokens
from agentspec.types import Labels, Namespace

MANY, FEW = 10_000, 20
LARGE = Namespace("large")


def text(seed: int, length: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 5000, length).astype(np.int32)


def name(number: int) -> Namespace:
    return Namespace(f"tenant-{number}", "m")


def record(cache: SuffixCache, output: Tokens, namespace: Namespace) -> None:
    with cache.request([1, 2], namespace=namespace, session="s") as request:
        request.extend(output)


def knows(cache: SuffixCache, output: Tokens, namespace: Namespace) -> bool:
    with cache.request(output[:4], namespace=namespace, session="probe", store=False) as request:
        return bool(request.draft(1).tokens.tolist() == [output[4]])


def fill(location: str | Path, count: int) -> None:
    """A database with `count` namespaces of one output each, the last but 100 of them of a namespace of 100."""
    names = [LARGE if count - 200 <= number < count - 100 else name(number) for number in range(count)]
    rows = [
        codec.encode(SequenceRecord(number, names[number], Labels(), text(number % 50, 20), text(0, 2), 1.0))
        for number in range(count)
    ]
    store = SequenceStore.open(location, disk_bytes=None, mode="writer")
    with closing(store), store.database.writing() as connection:
        connection.execute(sequences.insert(), rows)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Of this thread: SQL statements, rows read, listings of the folder, files opened, namespaces looked at."""
    counts: Counter[str] = Counter()
    me = threading.get_ident()

    def count(what: str) -> None:
        counts[what] += threading.get_ident() == me

    def counted(what: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            count(what)
            return original(*args)

        return wrapper

    for owner, method, what in (
        (LocalFiles, "names", "listings"),
        (LocalFiles, "size", "sizes"),
        (LocalFiles, "open", "files"),
        (StoreSync, "_lacks", "looks"),
        (Partition, "fresh_learned", "looks"),
    ):
        monkeypatch.setattr(owner, method, counted(what, getattr(owner, method)))

    def executed(*_: object) -> None:
        count("statements")

    event.listen(sa.Engine, "before_cursor_execute", executed)
    yield counts
    event.remove(sa.Engine, "before_cursor_execute", executed)


@pytest.mark.slow
def test_opening_costs_a_bounded_number_of_statements(
    location: str | Path, tmp_path: Path, calls: Counter[str], request: pytest.FixtureRequest
) -> None:
    on_disk = isinstance(location, Path)
    small = tmp_path / "small" if on_disk else request.getfixturevalue("server").address()
    costs = []
    for place, many in ((small, FEW), (location, MANY)):
        fill(place, many)
        if isinstance(place, Path):  # segments: their names are listed, those of what is not loaded are not opened
            for number in range(2, many - 17):
                (place / f"{name(number).key}.segment").touch()
        calls.clear()
        with SuffixCache.open(place, disk_bytes=1 << 30) as cache:
            costs.append(dict(calls))
            assert cache.stats().namespaces == namespaces._AT_ONCE
            calls.clear()
            assert knows(cache, text(1, 20), name(1))
            loading = dict(calls)
            assert loading["statements"] <= 6 and "listings" not in loading and loading.get("files", 0) <= 1
            if many == MANY:
                calls.clear()
                assert knows(cache, text((MANY - 150) % 50, 20), LARGE)
                assert calls["statements"] <= 6  # whether it has one output or a hundred
    few, most = costs
    assert most["statements"] == few["statements"] <= 80
    assert most.get("listings", 0) <= 2


@pytest.mark.parametrize("location", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)], indirect=True)
def test_looking_after_them_visits_those_that_changed(
    location: str | Path, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoreSync, "_fill", lambda *_: None)  # nothing is there to be loaded
    monkeypatch.setattr(LocalFiles, "sync", lambda *_: None)
    with SuffixCache.open(location, memory_bytes=1 << 30, tenant_disk_bytes=1 << 30) as cache:
        sync = cache._sync
        assert sync is not None and cache._maintenance is not None
        cache._maintenance.close()
        for number in range(MANY):
            cache.request([1, 2], namespace=name(number), store=False).close()
        sync.maintain()
        cache.flush()
        open_request = cache.request([1, 2], namespace=name(5))
        for turn in range(3):
            calls.clear()
            record(cache, text(turn, 50), name(turn))
            sync.maintain()
            sync.flush()
            assert calls["looks"] <= 6  # of the namespace that changed and of the one in use
            assert not calls["listings"] and calls["sizes"] <= 2 and calls["statements"] <= 20
        open_request.extend(text(9, 50))
        open_request.close()
        sync.flush()
        calls.clear()
        sync.maintain()
        sync.flush()
        sync.maintain()
        sync.flush()
        assert calls["looks"] <= 1
        store = cache._store
        assert store is not None
        store.flush()
        changed = {name(number).key for number in (0, 1, 2, 5)}
        with store.database.engine.connect() as connection:
            assert set(connection.execute(sa.select(learned.c.namespace)).scalars()) == changed


def test_segments_of_those_that_grew_are_written_and_no_others(tmp_path: Path, calls: Counter[str]) -> None:
    with SuffixCache.open(tmp_path) as cache:
        sync = cache._sync
        assert sync is not None and cache._maintenance is not None
        cache._maintenance.close()
        for number in range(5):
            record(cache, text(number, 70_000 if number in (1, 3) else 100), name(number))
        cache.flush()
        calls.clear()
        sync.maintain()
        assert calls["looks"] == 5
        grown = {f"{name(number).key}.segment" for number in (1, 3)}
        assert {file.name for file in tmp_path.glob("*.segment")} == grown
        for file in tmp_path.glob("*.segment"):
            file.unlink()
        calls.clear()
        sync.maintain()
        assert not calls["looks"] and not list(tmp_path.glob("*.segment"))


def test_a_process_that_becomes_the_writer_looks_at_all_once(tmp_path: Path, calls: Counter[str]) -> None:
    with SuffixCache.open(tmp_path) as first:
        record(first, text(1, 20), name(0))
        second = SuffixCache.open(tmp_path)
        assert second._maintenance is not None
        second._maintenance.close()
        for number in range(5):
            record(second, text(number, 70_000 if number == 3 else 100), name(number))
        second.flush()
    with second:
        sync = second._sync
        assert sync is not None and second.stats().mode == "follower"
        calls.clear()
        sync.maintain()
        assert not calls["looks"]
        sync.follow()
        assert second.stats().mode == "writer"
        sync.maintain()
        assert calls["looks"] >= 5
        assert [file.name for file in tmp_path.glob("*.segment")] == [f"{name(3).key}.segment"]
