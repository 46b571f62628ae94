"""Namespaces come into memory when they are used, and leave it when they are not, however many there are."""

from __future__ import annotations

import sqlite3
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

from agentspec.cache import SuffixCache, eviction, namespaces
from agentspec.cache.deletion import select
from agentspec.cache.namespaces import NamespaceTable
from agentspec.cache.partition import Partition
from agentspec.cache.storage import codec, deletion_log
from agentspec.cache.storage.schema import sequences
from agentspec.cache.storage.segments import LocalFiles
from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.cache.storage.sqlite import DATABASE
from agentspec.cache.sync import StoreSync
from agentspec.cache.tokens import SequenceRecord, Tokens
from agentspec.errors import CacheFormatError, CacheUnavailableError
from agentspec.types import Namespace

MANY = 40


def text(seed: int, length: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 5000, length).astype(np.int32)


def name(number: int) -> Namespace:
    return Namespace(f"tenant-{number}", "m")


def record(cache: SuffixCache, output: Tokens, namespace: Namespace, session: str | None = None) -> None:
    with cache.request([1, 2], namespace=namespace, session=session) as request:
        request.extend(output)


def knows(cache: SuffixCache, output: Tokens, namespace: Namespace) -> bool:
    with cache.request(output[:4], namespace=namespace, session="probe", store=False) as request:
        return bool(request.draft(1).tokens.tolist() == [output[4]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("many")
    with SuffixCache.open(path) as cache:
        for number in range(MANY):
            record(cache, text(number, 60), name(number), session=f"s{number % 2}")
        cache.compact()
        for number in range(0, MANY, 2):
            record(cache, text(100 + number, 60), name(number))  # in no segment
    return path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How often the folder was listed, segments were opened, and namespaces read from the database."""
    counts = {"names": 0, "open": 0, "newest": 0}
    for owner, method in ((LocalFiles, "names"), (LocalFiles, "open"), (SequenceStore, "newest")):
        original = getattr(owner, method)

        def counted(*args: object, method: str = method, original: object = original) -> object:
            counts[method] += 1
            return original(*args)  # type: ignore[operator]

        monkeypatch.setattr(owner, method, counted)
    return counts


def test_only_what_is_used_is_loaded(folder: Path, calls: dict[str, int]) -> None:
    with SuffixCache.open(folder, mode="follower") as cache:
        assert cache.stats().namespaces == namespaces._AT_ONCE == 16
        assert calls["names"] <= 2 and calls["open"] == calls["newest"] == 16
        assert all(knows(cache, text(number, 60), name(number)) for number in range(MANY))
        assert all(knows(cache, text(100 + number, 60), name(number)) for number in range(0, MANY, 2))
        assert not knows(cache, text(1, 60), name(2))
        assert (calls["open"], calls["newest"]) == (MANY, MANY)  # each once
        assert cache.stats().namespaces == MANY and cache.stats().sequences == MANY * 3 // 2


def test_what_is_not_loaded_is_forgotten_too(tmp_path: Path, folder: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with SuffixCache.open(tmp_path) as cache:
        assert cache.forget(session="s1") == MANY // 2
        assert cache.forget(tenant=name(0).tenant) == 2
        known = [number for number in range(MANY) if knows(cache, text(number, 60), name(number))]
        assert known == list(range(2, MANY, 2))
        assert cache.forget(older_than=0) == MANY - 2
        assert not any(knows(cache, text(number, 60), name(number)) for number in range(MANY))
    assert list(tmp_path.glob("*.segment")) == []


def test_what_others_write_is_there_once_it_is_used(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with SuffixCache.open(tmp_path) as writer, SuffixCache.open(tmp_path) as follower:
        unloaded = [one for one in map(name, range(MANY)) if not follower._pool.namespaces.loaded(one)]
        for turn in (1000, 1001):
            record(writer, text(turn, 60), unloaded[0])
            writer.flush()
            assert follower._sync is not None
            follower._sync.follow()
            assert (follower._pool.namespaces.loaded(unloaded[0]) is not None) == (turn == 1001)
            assert knows(follower, text(turn, 60), unloaded[0])


def test_idle_namespaces_leave_memory_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "_IDLE_SECONDS", 0.0)
    models = [Namespace("t", f"m{number}") for number in range(6)]
    with SuffixCache.open(tmp_path, tenant_memory_bytes=700 << 10) as cache:
        held = cache.request([1, 2], namespace=models[0], session="held")
        for turn in range(30):
            for number, model in enumerate(models):
                record(cache, text(100 * number + turn, 500), model, session="s")
            cache.flush()
            assert cache.tenant_bytes()["t"] <= 700 << 10
        stats = cache.stats()
        assert stats.unloaded > 0
        assert cache._pool.namespaces.loaded(models[0])  # a request is open
        held.close()
        assert [knows(cache, text(100 * number + 29, 500), model) for number, model in enumerate(models)] == [True] * 6
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
        assert connection.execute("SELECT count(*) FROM sequences").fetchone() == (180,)  # nothing left the disk


@pytest.mark.parametrize("stored", [False, True])
def test_a_tenant_has_no_more_namespaces_in_memory_than_it_may(
    tmp_path: Path, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespaces, "TENANT_NAMESPACES", 5)
    with SuffixCache.open(tmp_path if stored else None) as cache:
        record(cache, text(1, 60), Namespace("other"))
        held = [cache.request([1], namespace=Namespace("t", f"held{number}")) for number in range(3)]
        for number in range(20):
            record(cache, text(number, 60), Namespace("t", f"m{number}"))
            if stored:
                cache.flush()
        assert cache.stats().namespaces == 5 + 1
        assert knows(cache, text(1, 60), Namespace("other"))
        assert knows(cache, text(19, 60), Namespace("t", "m19"))
        assert knows(cache, text(0, 60), Namespace("t", "m0")) == stored
        for request in held:
            request.close()


def test_what_waits_to_be_written_is_there_when_its_namespace_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Namespace("t", "m0"), Namespace("t", "m1")
    monkeypatch.setattr(namespaces, "TENANT_NAMESPACES", 1)
    with SuffixCache.open(tmp_path) as cache:
        assert cache._store is not None
        with cache._store.database.writing():  # nothing is written as long as this one is
            record(cache, text(0, 60), one)
            record(cache, text(1, 60), one, session="forgotten")
            record(cache, text(2, 60), other)  # so that the first leaves
            assert knows(cache, text(0, 60), one) and knows(cache, text(1, 60), one)
            assert len(cache._store.unwritten(one)) == 2
            with monkeypatch.context() as deleted:
                deleted.setattr(deletion_log, "since", lambda *_: [(1, select(session="forgotten").scope)])
                assert len(cache._store.unwritten(one)) == 1
            record(cache, text(3, 60), other)
        cache.flush()
        assert knows(cache, text(0, 60), one)
        assert cache.stats().unloaded > 2


def test_a_database_that_does_not_answer_costs_the_past_until_it_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unavailable(*_: object) -> None:
        raise CacheUnavailableError("away")

    with SuffixCache.open(folder, mode="follower") as cache:
        unloaded = next(number for number in range(MANY) if not cache._pool.namespaces.loaded(name(number)))
        with monkeypatch.context() as broken:
            broken.setattr(StoreSync, "_fill", unavailable)
            assert not knows(cache, text(unloaded, 60), name(unloaded))
            assert "cannot be loaded: away" in caplog.text
        assert cache._sync is not None
        cache._sync._load_at = 0.0
        assert knows(cache, text(unloaded, 60), name(unloaded))


def test_a_namespace_that_cannot_be_loaded_holds_up_no_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = StoreSync._fill
    broken: list[Namespace] = []

    def damaged(sync: StoreSync, partition: Partition, *given: Any) -> None:
        if partition.namespace in broken:
            raise CacheFormatError("damaged")
        fill(sync, partition, *given)

    with SuffixCache.open(folder, mode="follower") as cache:
        unloaded = [number for number in range(MANY) if not cache._pool.namespaces.loaded(name(number))]
        broken.append(name(unloaded[0]))
        monkeypatch.setattr(StoreSync, "_fill", damaged)
        monkeypatch.setattr("agentspec.cache.sync._RETRY", 1e6)  # seconds, which do not pass
        assert not knows(cache, text(unloaded[0], 60), broken[0])
        assert knows(cache, text(unloaded[1], 60), name(unloaded[1]))
        assert not cache._pool.namespaces.loaded(broken[0])


@pytest.mark.parametrize("saved", [True, False], ids=["segments", "rows"])
def test_what_is_loaded_takes_the_place_of_others_first(
    location: str | Path, saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespaces, "_AT_ONCE", 0)
    limit, outputs = 1536 << 10, [140, 60, 60, 40]
    with SuffixCache.open(location) as cache:
        for number, count in enumerate(outputs):
            for turn in range(count):
                record(cache, text(1000 * number + turn, 800), name(number))
        (cache.compact if saved else cache.flush)()
        if not saved:
            monkeypatch.setattr(StoreSync, "_lacks", lambda *_: False)
    sizes: list[int] = []
    book = NamespaceTable.book

    def booked(table: NamespaceTable, partition: Partition) -> None:
        book(table, partition)
        sizes.append(table.total)

    monkeypatch.setattr(NamespaceTable, "book", booked)
    with SuffixCache.open(location, memory_bytes=limit) as cache:
        for number in (0, 1, 2, 3, 0, 1):
            assert knows(cache, text(1000 * number + outputs[number] - 1, 800), name(number))
            assert cache.tenant_bytes()[name(number).tenant] > limit // 11, "it got its part"
    assert max(sizes) <= limit, max(sizes) / limit


MOST, FEW = 10_000, 20


LARGE = Namespace("large")


def put(cache: SuffixCache, output: Tokens, namespace: Namespace) -> None:
    with cache.request([1, 2], namespace=namespace, session="s") as request:
        request.extend(output)


def fill(location: str | Path, count: int) -> None:
    """A database with `count` namespaces of one output each, the last but 100 of them of a namespace of 100."""
    names = [LARGE if count - 200 <= number < count - 100 else name(number) for number in range(count)]
    rows = [
        codec.encode(SequenceRecord(number, names[number], None, text(number % 50, 20), text(0, 2), 1.0))
        for number in range(count)
    ]
    store = SequenceStore.open(location, disk_bytes=None, mode="writer")
    with closing(store), store.database.writing() as connection:
        connection.execute(sequences.insert(), rows)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Of this thread: SQL statements, rows read, listings of the folder, files opened, namespaces looked at."""
    counts: Counter[str] = Counter()
    me = threading.get_ident()

    def count(what: str) -> None:
        if threading.get_ident() == me:  # else the name would be there, with nothing counted
            counts[what] += 1

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
    ):
        monkeypatch.setattr(owner, method, counted(what, getattr(owner, method)))

    def executed(*_: object) -> None:
        count("statements")

    event.listen(sa.Engine, "before_cursor_execute", executed)
    yield counts
    event.remove(sa.Engine, "before_cursor_execute", executed)


@pytest.mark.slow
def test_opening_costs_a_bounded_number_of_statements(
    location: str | Path, tmp_path: Path, counts: Counter[str], request: pytest.FixtureRequest
) -> None:
    on_disk = isinstance(location, Path)
    small = tmp_path / "small" if on_disk else request.getfixturevalue("server").address()
    costs = []
    for place, many in ((small, FEW), (location, MOST)):
        fill(place, many)
        if isinstance(place, Path):  # segments: their names are listed, those of what is not loaded are not opened
            for number in range(2, many - 17):
                (place / f"{name(number).key}.segment").touch()
        counts.clear()
        with SuffixCache.open(place, disk_bytes=1 << 30) as cache:
            costs.append(dict(counts))
            assert cache.stats().namespaces == namespaces._AT_ONCE
            counts.clear()
            assert knows(cache, text(1, 20), name(1))
            loading = dict(counts)
            assert loading["statements"] <= 6 and "listings" not in loading and loading.get("files", 0) <= 1
            if many == MOST:
                counts.clear()
                assert knows(cache, text((MOST - 150) % 50, 20), LARGE)
                assert counts["statements"] <= 6  # whether it has one output or a hundred
    few, most = costs
    assert most["statements"] == few["statements"] <= 80
    assert most.get("listings", 0) <= 2


@pytest.mark.parametrize("location", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)], indirect=True)
def test_looking_after_them_visits_those_that_changed(
    location: str | Path, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoreSync, "_fill", lambda *_: None)  # nothing is there to be loaded
    monkeypatch.setattr(LocalFiles, "sync", lambda *_: None)
    with SuffixCache.open(location, memory_bytes=1 << 30, tenant_disk_bytes=1 << 30) as cache:
        sync = cache._sync
        assert sync is not None and cache._maintenance is not None
        cache._maintenance.close()
        for number in range(MOST):
            cache.request([1, 2], namespace=name(number), store=False).close()
        sync.maintain()
        cache.flush()
        open_request = cache.request([1, 2], namespace=name(5))
        for turn in range(3):
            counts.clear()
            put(cache, text(turn, 50), name(turn))
            sync.maintain()
            sync.flush()
            assert counts["looks"] <= 6  # of the namespace that changed and of the one in use
            assert not counts["listings"] and counts["sizes"] <= 2 and counts["statements"] <= 20
        open_request.extend(text(9, 50))
        open_request.close()
        sync.flush()
        counts.clear()
        sync.maintain()
        sync.flush()
        sync.maintain()
        sync.flush()
        assert counts["looks"] <= 1


def test_segments_of_those_that_grew_are_written_and_no_others(tmp_path: Path, counts: Counter[str]) -> None:
    with SuffixCache.open(tmp_path) as cache:
        sync = cache._sync
        assert sync is not None and cache._maintenance is not None
        cache._maintenance.close()
        for number in range(5):
            put(cache, text(number, 70_000 if number in (1, 3) else 100), name(number))
        cache.flush()
        counts.clear()
        sync.maintain()
        assert counts["looks"] == 5
        grown = {f"{name(number).key}.segment" for number in (1, 3)}
        assert {file.name for file in tmp_path.glob("*.segment")} == grown
        for file in tmp_path.glob("*.segment"):
            file.unlink()
        counts.clear()
        sync.maintain()
        assert not counts["looks"] and not list(tmp_path.glob("*.segment"))


def test_a_process_that_becomes_the_writer_looks_at_all_once(tmp_path: Path, counts: Counter[str]) -> None:
    with SuffixCache.open(tmp_path) as first:
        put(first, text(1, 20), name(0))
        second = SuffixCache.open(tmp_path)
        assert second._maintenance is not None
        second._maintenance.close()
        for number in range(5):
            put(second, text(number, 70_000 if number == 3 else 100), name(number))
        second.flush()
    with second:
        sync = second._sync
        assert sync is not None and second.stats().mode == "follower"
        counts.clear()
        sync.maintain()
        assert not counts["looks"]
        sync.follow()
        assert second.stats().mode == "writer"
        sync.maintain()
        assert counts["looks"] >= 5
        assert [file.name for file in tmp_path.glob("*.segment")] == [f"{name(3).key}.segment"]
