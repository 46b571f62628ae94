"""Namespaces come into memory when they are used, and leave it when they are not, however many there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentspec.cache import SuffixCache
from agentspec.types import Namespace
from tests.cache.conftest import knows, outputs, record, text, wait

MANY = 40


def name(number: int) -> Namespace:
    return Namespace(f"tenant-{number}", "m")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("many")
    with SuffixCache.open(path) as cache:
        for number in range(MANY):
            record(cache, text(number, 60), namespace=name(number), session=f"s{number % 2}")
        cache.compact()
        for number in range(0, MANY, 2):
            record(cache, text(100 + number, 60), namespace=name(number))  # in no segment
    return path


def test_only_what_is_used_is_loaded(folder: Path) -> None:
    with SuffixCache.open(folder, mode="follower") as cache:
        assert cache.stats().namespaces == 16
        assert all(knows(cache, text(number, 60), name(number)) for number in range(MANY))
        assert all(knows(cache, text(100 + number, 60), name(number)) for number in range(0, MANY, 2))
        assert not knows(cache, text(1, 60), name(2))
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
        for turn in (1000, 1001):
            record(writer, text(turn, 60), namespace=name(1))  # which is not among the newest
            writer.flush()
            wait(lambda: follower.stats().unread == 0 and follower.stats().behind < 1)
            wait(lambda turn=turn: knows(follower, text(turn, 60), name(1)))


def test_a_tenant_has_no_more_namespaces_in_memory_than_it_may() -> None:
    with SuffixCache.open(memory_bytes=1 << 30) as cache:
        record(cache, text(1, 60), namespace="other")
        held = [cache.request([1], namespace=Namespace("t", f"held{number}")) for number in range(3)]
        record(cache, text(0, 60), namespace=Namespace("t", "first"))
        for number in range(4096):
            cache.request([1], namespace=Namespace("t", f"m{number}"), session="s").close()
        assert cache.stats().namespaces == 4096 + 1
        assert knows(cache, text(1, 60), "other") and not knows(cache, text(0, 60), Namespace("t", "first"))
        for request in held:
            request.close()


@pytest.mark.parametrize("saved", [True, False], ids=["segments", "rows"])
def test_what_is_loaded_takes_the_place_of_others_first(location: str | Path, saved: bool) -> None:
    limit, counts = 1536 << 10, [140, 60, 60, 40]
    with SuffixCache.open(location) as cache:
        for number, count in enumerate(counts):
            for turn in range(count):
                record(cache, text(1000 * number + turn, 800), namespace=name(number))
        (cache.compact if saved else cache.flush)()
    with SuffixCache.open(location, memory_bytes=limit) as cache:
        for number in (0, 1, 2, 3, 0, 1):
            assert knows(cache, text(1000 * number + counts[number] - 1, 800), name(number))
            assert cache.tenant_bytes()[name(number).tenant] > limit // 11, "it got its part"
            assert cache.stats().memory_bytes <= limit


def test_a_database_that_does_not_answer_costs_the_past_until_it_does(server: Any, postgres: str) -> None:
    with SuffixCache.open(postgres) as cache:
        for number in range(20):  # of which the newest are loaded at the start
            record(cache, text(number, 60), namespace=name(number))
    with SuffixCache.open(postgres, mode="follower") as cache:
        server.stop()
        try:
            assert not knows(cache, text(0, 60), name(0)) and knows(cache, text(19, 60), name(19))
        finally:
            server.start()
        wait(lambda: knows(cache, text(0, 60), name(0)))


def test_idle_namespaces_leave_memory_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.cache.eviction._IDLE_SECONDS", 0.0)  # else a namespace is idle after a minute
    models = [Namespace("t", f"m{number}") for number in range(6)]
    with SuffixCache.open(tmp_path, tenant_memory_bytes=700 << 10) as cache:
        held = cache.request([1, 2], namespace=models[0], session="held")
        for turn in range(30):
            for number, model in enumerate(models):
                record(cache, text(100 * number + turn, 500), namespace=model, session="s")
            cache.flush()
            assert cache.tenant_bytes()["t"] <= 700 << 10
        stats = cache.stats()
        assert stats.unloaded > 0
        held.close()
        assert [knows(cache, text(100 * number + 29, 500), model) for number, model in enumerate(models)] == [True] * 6
    assert len(outputs(tmp_path)) == 180  # nothing left the disk
