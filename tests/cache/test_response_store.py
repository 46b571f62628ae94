"""Stored answers: what comes back, their bounds, and what a deletion leaves."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest

from agentspec.cache import SuffixCache
from agentspec.cache.stored import StoredResponse
from agentspec.errors import CacheDamagedError, CacheError, CacheVersionError
from tests.cache.conftest import SQLITE_FIRST, STATE, execute, record, wait


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path | None:
    """Where a cache may be."""
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres"))
    return tmp_path if request.param == "sqlite" else None


def noise(seed: int, length: int) -> str:
    """Text that compresses little."""
    return "".join(chr(0x4E00 + (seed * 31 + place * 7919) % 20000) for place in range(length))


def make(id: str, text: str = "hello", tenant: str = "a", **fields: Any) -> StoredResponse:
    item = {"id": f"msg_{id}", "type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    given = {"created_at": time.time(), "response": {"id": id, "output": []}, "items": [item], **fields}
    return StoredResponse(id, tenant, **given)


def answers(cache: SuffixCache, ids: Any, tenant: str = "a") -> list[str]:
    return [id for id in ids if cache.responses.get(tenant, id) is not None]


def test_what_is_put_comes_back_to_its_tenant(place: Any) -> None:
    with SuffixCache.open(place) as cache:
        store = cache.responses
        first, second = make("r1", "wörld\0"), make("r2", session="s", previous="r1")
        assert store.get("a", "r1") is None and not store.delete("a", "r1")
        assert store.put(first) and store.put(second) and store.put(second)
        assert store.get("a", "r1") == first and store.get("a", "r2") == second
        assert store.get("b", "r1") is None and not store.delete("b", "r1")
        assert not store.put(make("r1", tenant="b")), "another tenant has one of that id"
        assert store.delete("a", "r1") and not store.delete("a", "r1") and answers(cache, ["r1", "r2"]) == ["r2"]
        store.put(make("u", backend="up"))
        found = store.get("a", "u")
        assert found and (found.backend, found.response, list(found.items)) == ("up", {}, [])


def test_the_oldest_of_the_largest_tenant_go(place: Any) -> None:
    with SuffixCache.open(place, responses_bytes=200_000) as cache:
        cache.responses.put(make("b0", tenant="b"))
        for number in range(100):
            answer = make(f"a{number}", noise(number, 1500), created_at=time.time() + number / 1000)
            assert cache.responses.put(answer)
        found = answers(cache, (f"a{number}" for number in range(100)))
        assert 10 < len(found) < 60 and found == [f"a{number}" for number in range(100 - len(found), 100)]
        assert answers(cache, ["b0"], "b") == ["b0"]
        assert not cache.responses.put(make("large", os.urandom(50_000).hex())), "more than an eighth of the bound"
        assert not cache.responses.put(make("larger", "a" * (65 << 20))), "it is small until it is read again"


def test_what_is_too_old_goes(place: Any) -> None:
    with SuffixCache.open(place, retention=3600.0) as cache:
        cache.responses.put(make("old", created_at=time.time() - 3700))
        cache.responses.put(make("new"))
        assert answers(cache, ["old", "new"]) == ["new"]


# Forgetting.


@pytest.mark.parametrize(
    ("conditions", "left"),
    [
        ({"tenant": "a"}, ["b1"]),
        ({"session": "s"}, ["a2", "b1"]),
        ({"older_than": 50}, ["a2", "b1"]),
        ({"session": "s", "tenant": "b"}, ["a1", "a2", "b1"]),
        ({"text": "secret", "decode": str}, ["a1", "b1"]),
        ({"text": "cut in two", "decode": str}, ["a1", "a2"]),
        ({"text": 'say "hi"\nthere', "decode": str}, ["a2", "b1"]),
        ({"text": "café", "decode": str}, ["a2", "b1"]),
    ],
)
def test_forgetting(place: Any, conditions: Any, left: list[str]) -> None:
    """Also of text in names, arguments, and parts of a message."""
    said = json.dumps({"café": 'say "hi"\nthere'})
    parts = [{"type": "input_text", "text": text} for text in ("cut in", " two")]
    with SuffixCache.open(place) as cache:
        call = {"id": "c", "type": "function_call", "arguments": said}
        cache.responses.put(make("a1", session="s", created_at=time.time() - 100, response={"output": [call]}))
        cache.responses.put(make("a2", "my secret"))
        cache.responses.put(make("b1", tenant="b", items=[{"id": "x", "type": "message", "content": parts}]))
        cache.forget(**conditions)
        assert [*answers(cache, ["a1", "a2"]), *answers(cache, ["b1"], "b")] == left


def test_what_a_pattern_refuses_is_not_stored(place: Any) -> None:
    with SuffixCache.open(place, refuse_patterns=["sk-[0-9]+"]) as cache:
        escaped = json.dumps({"key": "\u0073k-1"}, ensure_ascii=True)
        assert not cache.responses.put(make("r1", "my sk-12 key"))
        assert not cache.responses.put(make("r2", response={"output": [{"arguments": escaped}]}))
        assert cache.responses.put(make("r3", "my key")) and answers(cache, ["r1", "r2", "r3"]) == ["r3"]


@pytest.mark.parametrize(
    ("conditions", "refused"),
    [
        ({"tenant": "a"}, ["whole", "under way"]),
        ({"session": "s"}, ["whole", "under way"]),
        ({"session": "t"}, []),
        ({"tenant": "b"}, []),
        ({"older_than": 50}, ["old"]),
        ({"text": "never written", "decode": str}, ["whole", "old"]),
    ],
)
def test_what_was_forgotten_meanwhile_is_not_stored(place: Any, conditions: Any, refused: list[str]) -> None:
    """A store that is slow, or has a queue, comes to an answer after the deletion that covers it."""
    now = time.time()
    made = {
        "whole": make("whole", session="s", created_at=now),
        "old": make("old", tenant="c", created_at=now - 100),
        "under way": make("under way", session="s", created_at=now + 100, begun=now),
        "later": make("later", session="s", created_at=now + 100),
    }
    with SuffixCache.open(place) as cache:
        cache.forget(**conditions)
        assert [id for id, one in made.items() if not cache.responses.put(one)] == refused
        assert cache.responses.put(make("new", session="s"))


@pytest.mark.parametrize("hours", [-2, 2])
@pytest.mark.parametrize("when", ["before the deletion", "after it"])
def test_a_clock_that_is_set_hides_no_deletion(
    place: Any, monkeypatch: pytest.MonkeyPatch, hours: int, when: str
) -> None:
    clock, begun = time.time, time.monotonic()
    with SuffixCache.open(place) as cache:
        for step in ("before the deletion", "after it"):
            if step == "after it":
                with SuffixCache.open(place) if place else nullcontext(cache) as other:
                    other.forget(session="s")
            if step == when:
                monkeypatch.setattr(time, "time", lambda: clock() + 3600.0 * hours)  # the clock is what is tested
        now = time.time()
        assert not cache.responses.put(make("r", session="s", created_at=now, begun=now - (time.monotonic() - begun)))
        cache.forget(session="another")  # from here on it is known
        assert cache.responses.put(make("r", session="s", created_at=time.time()))


@SQLITE_FIRST
def test_a_deletion_of_another_process_reaches_what_waits(location: str | Path) -> None:
    with SuffixCache.open(location) as one, SuffixCache.open(location) as other:
        record(one, [3, 4, 5], session="s1")
        late = make("late", session="s1")
        one.flush()
        assert other.forget(session="s1") == 1
        assert not one.responses.put(late)
        assert other.responses.put(make("new", session="s1"))
        assert not other.stats().erasure_pending


def test_nothing_of_what_was_deleted_is_left_on_disk(tmp_path: Path) -> None:
    def found(marker: bytes) -> bool:
        return any(marker in file.read_bytes() for file in tmp_path.iterdir())

    with SuffixCache.open(tmp_path) as cache:
        cache.responses.put(make("resp_thisone", session="s"))
        cache.responses.put(make("other"))
        cache.flush()
        assert found(b"resp_thisone")
        cache.forget(session="s")
        assert not found(b"resp_thisone")
        cache.responses.put(make("resp_thisone"))
        cache.responses.delete("a", "resp_thisone")
        wait(lambda: not cache.stats().erasure_pending)
        assert not found(b"resp_thisone") and answers(cache, ["other"]) == ["other"]


# Their database.


@pytest.mark.parametrize("mode", ["auto", "writer", "follower"])
@pytest.mark.parametrize("damage", ["noise", "version"])
def test_nothing_starts_without_them(tmp_path: Path, mode: Any, damage: str) -> None:
    with SuffixCache.open(tmp_path) as cache:
        record(cache, [3, 4, 5])
        assert cache.responses.put(make("r"))
    path = tmp_path / STATE
    if damage == "noise":
        path.write_bytes(b"x" * path.stat().st_size)
    else:
        execute(tmp_path, "UPDATE agentspec_meta SET value = '99'", file=STATE)
    before = path.read_bytes()
    error, said = (CacheDamagedError, "restore a backup") if damage == "noise" else (CacheVersionError, "99")
    for _ in range(2):
        with pytest.raises(error, match=said):
            SuffixCache.open(tmp_path, mode=mode)
    assert path.read_bytes() == before
    path.unlink()
    with SuffixCache.open(tmp_path, mode="writer") as cache:
        assert cache.stats().sequences == 1 and cache.responses.get("a", "r") is None


def test_what_cannot_be_changed_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.cache.storage.sqlite._TIMEOUT", 0)  # else it waits for half a minute
    with SuffixCache.open(tmp_path) as cache, closing(sqlite3.connect(tmp_path / STATE, isolation_level=None)) as other:
        record(cache, [3, 4, 5], session="secret")
        cache.responses.put(make("r", session="secret"))
        cache.flush()
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(CacheError, match="locked"):
            cache.forget(session="secret")
        other.execute("ROLLBACK")
        assert (cache.stats().sequences, answers(cache, ["r"])) == (1, ["r"])
        cache.flush()
        assert cache.forget(session="secret") == 1
        assert (cache.stats().sequences, answers(cache, ["r"])) == (0, [])


def test_runs_have_bounds_of_their_own_and_go_with_all_else(place: Any) -> None:
    with SuffixCache.open(place) as cache:
        assert not cache.runs.put(make("r1")), "none is kept unless the settings say how much"
    with SuffixCache.open(place, runs_bytes=200_000, runs_retention=60.0) as cache:
        for number in range(100):
            session = f"s{number % 2}"
            assert cache.runs.put(
                make(f"r{number}", noise(number, 1500), session=session, created_at=time.time() + number / 1000)
            )
        cache.responses.put(make("r1"))
        newest = [one.id for one in cache.runs.newest("a", 5)]
        assert newest == ["r99", "r98", "r97", "r96", "r95"] and cache.runs.newest("b", 5) == []
        kept = [one.id for one in cache.runs.newest("a", 200)]
        assert 10 < len(kept) < 60 and answers(cache, ["r1"]) == ["r1"], "the largest bound is not the other's"
        cache.forget(session="s0")
        assert [one.session for one in cache.runs.newest("a", 200)] == ["s1"] * len(
            [id for id in kept if int(id[1:]) % 2]
        )
        assert [one.id for one in cache.runs.newest("a", 2, "s1")] == ["r99", "r97"]
        assert cache.runs.put(make("old", created_at=time.time() - 61)) and cache.runs.get("a", "old") is None
        cache.forget(tenant="a")
        assert cache.runs.newest("a", 200) == [] and answers(cache, ["r1"]) == []
