"""What is stored besides sequences, answers and turns: what comes back, their bounds, and what a deletion leaves."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentspec.cache import SuffixCache
from agentspec.cache.stored import StoredResponse, StoredTurn, new_turn
from agentspec.errors import CacheClosedError, CacheDamagedError, CacheError, CacheVersionError
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


def made(tenant: str = "a", agent: str = "x", session: str = "s", body: str = "{}", age: float = 0.0) -> StoredTurn:
    return replace(new_turn(tenant, agent, session, body), created_at=time.time() - age)


def turns_of(cache: SuffixCache, tenant: str = "a", agent: str = "x") -> list[StoredTurn]:
    return cache.tool_turns.read(tenant, agent, cache.tool_turns.ids(tenant, agent))


# Answers.


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
        cache.tool_turns.put(made(age=3700.0))
        cache.tool_turns.put(made(age=1.0))
        assert answers(cache, ["old", "new"]) == ["new"]
        wait(lambda: len(turns_of(cache)) == 1)


# Turns.


def test_turns_come_back_to_their_agent_alone(place: Any) -> None:
    with SuffixCache.open(place) as cache:
        turns = [made(body=f'{{"n": {n}, "text": "wörld"}}', age=9.0 - n) for n in range(3)]
        assert turns_of(cache) == [] and all(cache.tool_turns.put(turn) for turn in turns)
        for _ in range(2):
            assert turns_of(cache) == turns  # before and after they are written
            assert turns_of(cache, "b") == turns_of(cache, "a", "y") == []
            assert (
                cache.tool_turns.read("a", "y", [turns[0].id]) == cache.tool_turns.read("b", "x", [turns[0].id]) == []
            )
            cache.tool_turns.flush()
        cache.tool_turns.put(last := made())
        assert turns_of(cache) == [*turns, last]
        assert not cache.tool_turns.put(made(body="x" * 70_000))


def test_an_agent_and_a_tenant_have_their_newest_turns(place: Any) -> None:
    """Each agent of one tenant is smaller than the one agent of another tenant."""
    with SuffixCache.open(place, responses_bytes=400_000) as cache:
        theirs = [made("b", age=100.0 - n) for n in range(20)]
        for turn in theirs:
            cache.tool_turns.put(turn)
        for n in range(300):
            cache.tool_turns.put(made(agent=f"x{n}", body=noise(n, 400)))
        cache.tool_turns.flush()
        assert turns_of(cache, "b") == theirs
        assert 0 < sum(len(turns_of(cache, agent=f"x{n}")) for n in range(300)) < 300
    with SuffixCache.open(place) as cache:
        turns = [made("c", age=5000.0 - n) for n in range(4001)]
        for turn in turns:
            cache.tool_turns.put(turn)
        cache.tool_turns.flush()
        found = turns_of(cache, "c")
        assert len(found) in (2000, 2001) and found == turns[-len(found) :]


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
@pytest.mark.parametrize("written", [True, False])
def test_forgetting(place: Any, conditions: Any, left: list[str], written: bool) -> None:
    """Of answers, also in names, arguments, and parts of a message; of turns, also those that are not written yet."""
    said = json.dumps({"café": 'say "hi"\nthere'})
    parts = [{"type": "input_text", "text": text} for text in ("cut in", " two")]
    with SuffixCache.open(place) as cache:
        call = {"id": "c", "type": "function_call", "arguments": said}
        cache.responses.put(make("a1", session="s", created_at=time.time() - 100, response={"output": [call]}))
        cache.responses.put(make("a2", "my secret"))
        cache.responses.put(make("b1", tenant="b", items=[{"id": "x", "type": "message", "content": parts}]))
        bodies = {"a1": said, "a2": '["my secret"]', "b1": '["cut in two"]'}
        for id, (tenant, session, age) in {"a1": ("a", "s", 100), "a2": ("a", "t", 0), "b1": ("b", "t", 0)}.items():
            cache.tool_turns.put(made(tenant, session=session, body=bodies[id], age=float(age)))
        if written:
            cache.tool_turns.flush()
        generation = cache.tool_turns.generation
        cache.forget(**conditions)
        assert [*answers(cache, ["a1", "a2"]), *answers(cache, ["b1"], "b")] == left
        found = {turn.body for turn in (*turns_of(cache), *turns_of(cache, "b"))}
        assert found == {bodies[id] for id in left}
        assert (cache.tool_turns.generation > generation) == (len(left) < 3)


def test_what_a_pattern_refuses_is_not_stored(place: Any) -> None:
    with SuffixCache.open(place, refuse_patterns=["sk-[0-9]+"]) as cache:
        escaped = json.dumps({"key": "\u0073k-1"}, ensure_ascii=True)
        assert not cache.responses.put(make("r1", "my sk-12 key"))
        assert not cache.responses.put(make("r2", response={"output": [{"arguments": escaped}]}))
        assert cache.responses.put(make("r3", "my key")) and answers(cache, ["r1", "r2", "r3"]) == ["r3"]
        assert not cache.tool_turns.put(made(body="sk-1")) and turns_of(cache) == []


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
        turn = new_turn("a", "agent", "s", "a secret")
        cache.tool_turns.put(turn)
        for step in ("before the deletion", "after it"):
            if step == "after it":
                with SuffixCache.open(place) if place else nullcontext(cache) as other:
                    other.forget(session="s")
            if step == when:
                monkeypatch.setattr(time, "time", lambda: clock() + 3600.0 * hours)  # the clock is what is tested
        now = time.time()
        assert not cache.responses.put(make("r", session="s", created_at=now, begun=now - (time.monotonic() - begun)))
        cache.tool_turns.flush()
        assert cache.tool_turns.read("a", "agent", [turn.id]) == []
        cache.forget(session="another")  # from here on it is known
        assert cache.responses.put(make("r", session="s", created_at=time.time()))


@SQLITE_FIRST
def test_a_deletion_of_another_process_reaches_what_waits(location: str | Path) -> None:
    with SuffixCache.open(location) as one, SuffixCache.open(location) as other:
        record(one, [3, 4, 5], session="s1")
        late = make("late", session="s1")
        put = [made(session=session) for session in ("s1", "s1", "s2")]
        assert all(one.tool_turns.put(turn) for turn in put)
        one.flush()
        assert other.forget(session="s1") == 1
        assert not one.responses.put(late) and turns_of(one) == [put[2]]
        wait(lambda: one.tool_turns.put(later := made(session="s1")) and not one.flush() and later in turns_of(one))
        assert other.responses.put(make("new", session="s1"))
        assert not other.stats().erasure_pending


def test_nothing_of_what_was_deleted_is_left_on_disk(tmp_path: Path) -> None:
    def found(marker: bytes) -> bool:
        return any(marker in file.read_bytes() for file in tmp_path.iterdir())

    with SuffixCache.open(tmp_path) as cache:
        cache.responses.put(make("resp_thisone", session="s"))
        cache.responses.put(make("other"))
        cache.tool_turns.put(made(session="secret-session"))
        cache.flush()
        assert found(b"resp_thisone") and found(b"secret-session")
        cache.forget(session="s")
        cache.forget(session="secret-session")
        assert not found(b"resp_thisone") and not found(b"secret-session")
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
        cache.tool_turns.put(turn := made(session="secret"))
        cache.flush()
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(CacheError, match="locked"):
            cache.forget(session="secret")
        cache.tool_turns.put(late := made())
        with pytest.raises(CacheError, match="locked"):
            cache.flush()
        other.execute("ROLLBACK")
        assert (cache.stats().sequences, answers(cache, ["r"]), turns_of(cache)) == (1, ["r"], [turn, late])
        cache.flush()
        assert cache.forget(session="secret") == 1
        assert (cache.stats().sequences, answers(cache, ["r"]), turns_of(cache)) == (0, [], [late])


def test_turns_outlive_a_restart_and_a_closed_cache_takes_none(tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path) as cache:
        assert cache.tool_turns.put(turn := made())
    assert not cache.tool_turns.put(made())
    with pytest.raises(CacheClosedError):
        turns_of(cache)
    with SuffixCache.open(tmp_path) as cache:
        assert turns_of(cache) == [turn]
