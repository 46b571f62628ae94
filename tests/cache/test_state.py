"""What is stored beside sequences: what is kept of answers and turns, their bounds, and what a deletion leaves."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from agentspec.cache import SuffixCache
from agentspec.cache import side_stores as table_module
from agentspec.cache import stored as stored_module
from agentspec.cache.deletion import Selection, select
from agentspec.cache.side_stores import ResponseStore, SideStore, ToolTurnStore
from agentspec.cache.storage.database import Database
from agentspec.cache.storage.opening import prepare
from agentspec.cache.storage.schema import tool_turns
from agentspec.cache.storage.sqlite import DATABASE, STATE, MemoryDatabase, SqliteDatabase
from agentspec.cache.stored import StoredResponse, StoredTurn, StoreLimits, new_turn
from agentspec.errors import CacheClosedError, CacheDamagedError, CacheError, CacheUnavailableError, CacheVersionError


def fill(folder: Path) -> None:
    with SuffixCache.open(folder) as cache:
        with cache.request([1, 2], session="secret") as request:
            request.extend([3, 4, 5])
        assert cache.responses.put(StoredResponse("r", "default", time.time(), session="secret"))
        cache.tool_turns.put(new_turn("default", "agent", "secret", "{}"))


def kept(cache: SuffixCache) -> tuple[int, bool, int]:
    turns = cache.tool_turns.ids("default", "agent")
    return cache.stats().sequences, cache.responses.get("default", "r") is not None, len(turns)


def test_they_outlive_the_sequences(tmp_path: Path) -> None:
    fill(tmp_path)
    for file in tmp_path.glob(f"{DATABASE}*"):
        file.write_bytes(b"no database")
    with SuffixCache.open(tmp_path) as cache:
        assert kept(cache) == (0, True, 1)


@pytest.mark.parametrize("mode", ["auto", "writer", "follower"])
@pytest.mark.parametrize("damage", ["noise", "version"])
def test_nothing_starts_without_them(tmp_path: Path, mode: str, damage: str) -> None:
    fill(tmp_path)
    path = tmp_path / STATE
    if damage == "noise":
        path.write_bytes(b"x" * path.stat().st_size)
    else:
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE agentspec_meta SET value = '99'")
    before = path.read_bytes()
    for _ in range(2):
        error, said = (CacheDamagedError, "restore a backup") if damage == "noise" else (CacheVersionError, "99")
        with pytest.raises(error, match=said):
            SuffixCache.open(tmp_path, mode=mode)  # type: ignore[arg-type]
    assert path.read_bytes() == before
    path.unlink()
    with SuffixCache.open(tmp_path, mode="writer") as cache:
        assert kept(cache) == (1, False, 0)


def test_a_deletion_reaches_them_and_those_that_wait(tmp_path: Path) -> None:
    fill(tmp_path)
    with SuffixCache.open(tmp_path) as cache, SuffixCache.open(tmp_path, mode="follower") as other:
        late = StoredResponse("late", "default", time.time(), session="secret")
        other.tool_turns.put(new_turn("default", "agent", "secret", "{}"))
        assert cache.forget(session="secret") == 1
        assert not other.responses.put(late)
        other.flush()
        assert kept(cache) == (0, False, 0)
        assert not cache.stats().erasure_pending
        assert all(b"secret" not in file.read_bytes() for file in tmp_path.iterdir())


def test_what_cannot_be_changed_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path)
    monkeypatch.setattr("agentspec.cache.storage.sqlite._TIMEOUT", 0)
    with SuffixCache.open(tmp_path) as cache, closing(sqlite3.connect(tmp_path / STATE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(CacheError, match="locked"):
            cache.forget(session="secret")
        other.execute("ROLLBACK")
        assert kept(cache) == (1, True, 1)
        assert cache.forget(session="secret") == 1
        assert kept(cache) == (0, False, 0)


Open = Callable[..., Any]


def memory() -> MemoryDatabase:
    database = MemoryDatabase()
    prepare(database)
    return database


@pytest.fixture
def store(database: Database | None) -> Open:
    """Open a store with these limits."""
    used = database or memory()
    return lambda **limits: ResponseStore(used, StoreLimits(**limits))


@pytest.fixture(params=["memory", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """Where a cache may be kept."""
    return tmp_path if request.param == "sqlite" else None


def forget(store: SideStore, selection: Selection) -> int:
    with store._writing() as connection:
        return store.forget_within(connection, selection)


def total_bytes(store: SideStore) -> int:
    with store.database.engine.connect() as connection:
        return sum(size + 512 for size in connection.execute(sa.select(store.table.c.size)).scalars())


def make(id: str, text: str = "hello", tenant: str = "a", **fields: Any) -> StoredResponse:
    item = {"id": f"msg_{id}", "type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    given = {"created_at": time.time(), "response": {"id": id, "output": []}, "items": [item], **fields}
    return StoredResponse(id, tenant, **given)


def answers(store: ResponseStore, ids: Any, tenant: str = "a") -> list[str]:
    return [id for id in ids if store.get(tenant, id) is not None]


def test_what_is_put_comes_back(store: Open) -> None:
    opened = store()
    first, second = make("r1", "wörld\0"), make("r2", session="s", previous="r1")
    assert opened.get("a", "r1") is None and not opened.delete("a", "r1") and total_bytes(opened) == 0
    assert opened.put(first) and opened.put(second) and opened.put(second)
    assert opened.get("a", "r1") == first and opened.get("a", "r2") == second
    assert opened.get("b", "r1") is None and not opened.delete("b", "r1")
    assert opened.delete("a", "r1") and not opened.delete("a", "r1") and answers(opened, ["r1", "r2"]) == ["r2"]


def test_an_upstreams_response_has_no_content(store: Open) -> None:
    opened = store()
    opened.put(make("u", backend="up"))
    found = opened.get("a", "u")
    assert (found.backend, found.response, list(found.items)) == ("up", {}, [])


def test_the_oldest_of_the_largest_tenant_go(store: Open) -> None:
    opened = store(total=200_000)
    opened.put(make("b0", tenant="b"))
    noise = "".join(chr(0x4E00 + (number * 7919) % 20000) for number in range(1500))  # which compresses little
    for number in range(100):
        opened.put(make(f"a{number}", noise[number:] + noise[:number], created_at=time.time() + number / 1000))
    assert total_bytes(opened) <= 200_000
    found = answers(opened, (f"a{number}" for number in range(100)))
    assert 10 < len(found) < 100 and found == [f"a{number}" for number in range(100 - len(found), 100)]
    assert answers(opened, ["b0"], "b") == ["b0"]
    assert not opened.put(make("large", os.urandom(50_000).hex())), "one of an eighth of the bound is not stored"


def test_what_could_not_be_read_again_is_not_stored(store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is small, compressed, and large again when it is read."""
    monkeypatch.setattr(stored_module, "MOST_UNPACKED", 100_000)
    opened = store()
    assert opened.put(make("fits", "a" * 90_000)) and not opened.put(make("large", "a" * 100_001))
    assert answers(opened, ["fits", "large"]) == ["fits"]


def test_a_tenants_bound_takes_only_its_own(store: Open) -> None:
    opened = store(total=1 << 20, tenant=20_000)
    opened.put(make("b0", tenant="b"))
    for number in range(60):
        opened.put(make(f"a{number}", created_at=time.time() + number / 1000))
    assert answers(opened, ["b0"], "b") == ["b0"] and total_bytes(opened) <= 21_000
    assert answers(opened, ["a59"]) == ["a59"] and answers(opened, ["a0"]) == []


def test_what_is_too_old_goes(store: Open) -> None:
    opened = store(seconds=100.0)
    opened.put(make("old", created_at=time.time() - 99.9))
    opened.put(make("new"))
    opened.put(make("older", created_at=time.time() - 200))
    assert answers(opened, ["older"]) == []
    opened.maintain()
    assert answers(opened, ["new"]) == ["new"]


@pytest.mark.parametrize(
    ("conditions", "left"),
    [
        ({"tenant": "a"}, ["b1"]),
        ({"session": "s"}, ["a2", "b1"]),
        ({"older_than": 50}, ["a2", "b1"]),
        ({"session": "s", "tenant": "b"}, ["a1", "a2", "b1"]),
        ({"text": "secret", "decode": str}, ["a1", "b1"]),
        ({"text": "cut in two", "decode": str}, ["a1", "a2"]),
    ],
)
def test_forgetting(store: Open, conditions: Any, left: list[str]) -> None:
    opened = store()
    opened.put(make("a1", session="s", created_at=time.time() - 100))
    opened.put(make("a2", "my secret"))
    parts = [{"type": "input_text", "text": text} for text in ("cut in", " two")]
    opened.put(make("b1", tenant="b", items=[{"id": "x", "type": "message", "content": parts}]))
    forget(opened, select(**conditions))
    found = [*answers(opened, ["a1", "a2"]), *answers(opened, ["b1"], "b")]
    assert found == left


@pytest.mark.parametrize("text", ['say "hi"\nthere', "café", "name"])
def test_a_search_looks_into_arguments_and_names(store: Open, text: str) -> None:
    opened = store()
    arguments = json.dumps({"code": 'say "hi"\nthere café', "name": 1})
    call = {"id": "c", "type": "function_call", "arguments": arguments}
    for id, one in (("whole", call), ("cut", call | {"arguments": arguments[:-1]})):
        opened.put(make(id, response={"id": id, "output": [one]}))
    opened.put(make("other", response={"id": "other", "output": [], "metadata": {"other": "x"}}))
    assert forget(opened, select(text=text, decode=str)) == 2
    assert answers(opened, ["whole", "cut", "other"]) == ["other"]


def test_what_a_pattern_refuses_is_not_stored(place: Path | None) -> None:
    with SuffixCache.open(place, refuse_patterns=["sk-[0-9]+"]) as cache:
        escaped = json.dumps({"key": "\u0073k-1"}, ensure_ascii=True)
        assert not cache.responses.put(make("r1", "my sk-12 key"))
        assert not cache.responses.put(make("r2", response={"output": [{"arguments": escaped}]}))
        assert cache.responses.put(make("r3", "my key"))
        assert answers(cache.responses, ["r1", "r2", "r3"]) == ["r3"]


@pytest.mark.parametrize(
    ("conditions", "refused"),
    [
        ({"tenant": "a"}, ["whole", "under way"]),
        ({"session": "s"}, ["whole", "under way"]),
        ({"session": "t"}, []),
        ({"tenant": "b"}, []),
        ({"older_than": 50}, ["old"]),
        ({"text": "nobody wrote it", "decode": str}, ["whole", "old"]),
    ],
)
def test_what_was_forgotten_meanwhile_is_not_stored(place: Path | None, conditions: Any, refused: list[str]) -> None:
    """A store that is slow, or has a queue, comes to an answer after the deletion that covers it."""
    now = time.time()
    answers = {
        "whole": make("whole", session="s", created_at=now),
        "old": make("old", tenant="c", created_at=now - 100),
        "under way": make("under way", session="s", created_at=now + 100, begun=now),
        "later": make("later", session="s", created_at=now + 100),
    }
    with SuffixCache.open(place) as cache:
        cache.forget(**conditions)
        assert [id for id, one in answers.items() if not cache.responses.put(one)] == refused
        assert cache.responses.put(make("new", session="s"))


@pytest.mark.parametrize("hours", [-2, 2])
@pytest.mark.parametrize("when", ["before the deletion", "after it"])
def test_a_clock_that_is_set_hides_no_deletion(
    place: Path | None, monkeypatch: pytest.MonkeyPatch, hours: int, when: str
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
                monkeypatch.setattr(time, "time", lambda: clock() + 3600.0 * hours)
        now = time.time()
        assert not cache.responses.put(make("r", session="s", created_at=now, begun=now - (time.monotonic() - begun)))
        cache.tool_turns.flush()
        assert cache.tool_turns.read("a", "agent", [turn.id]) == []
        cache.forget(session="another")  # from here on it is known
        assert cache.responses.put(make("r", session="s", created_at=time.time()))


def test_what_a_damaged_name_owns_keeps_no_bound_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = SqliteDatabase(tmp_path)
    database.connect()
    prepare(database)
    opened = ResponseStore(database, StoreLimits(total=100_000))
    looked = 0

    def delete_oldest(self: ResponseStore, *given: Any) -> int:
        nonlocal looked
        looked += 1
        assert looked < 1000, "it would go on for ever"
        return original(self, *given)

    original = ResponseStore._delete_oldest
    monkeypatch.setattr(ResponseStore, "_delete_oldest", delete_oldest)
    for number in range(8):
        opened.put(make(f"a{number}", os.urandom(4000).hex()))
    with database.writing() as connection:
        connection.exec_driver_sql("UPDATE responses SET tenant = CAST(x'61ff' AS TEXT)")
    for number in range(40):
        assert opened.put(make(f"b{number}", os.urandom(4000).hex(), tenant="b", created_at=time.time() + number))
    assert 0 < len(answers(opened, (f"b{number}" for number in range(40)), "b")) < 40
    database.close()


def test_a_cache_forgets_and_bounds_its_responses(tmp_path: Path) -> None:
    secret = "zq" * 40
    with SuffixCache.open(tmp_path, responses_bytes=1 << 20, disk_bytes=8 << 20) as cache:
        assert cache.responses.put(make("r1", response={"id": "r1", "output": [], "x": secret}))
        assert cache.responses.put(make("r2", tenant="b"))
        cache.forget(tenant="a")
        assert answers(cache.responses, ["r1"]) == [] and answers(cache.responses, ["r2"], "b") == ["r2"]
    with SuffixCache.open(tmp_path, retention=0.001) as cache:
        time.sleep(0.01)
        assert answers(cache.responses, ["r2"], "b") == []


def test_nothing_of_what_was_deleted_is_left_on_disk(tmp_path: Path) -> None:
    marker = "resp_thisidcanbefound"
    with SuffixCache.open(tmp_path) as cache:
        cache.responses.put(make(marker, session="s"))
        cache.responses.put(make("other"))
        assert any(marker.encode() in file.read_bytes() for file in tmp_path.iterdir())
        cache.forget(session="s")
        assert not any(marker.encode() in file.read_bytes() for file in tmp_path.iterdir())
        cache.responses.put(make(marker))
        cache.responses.delete("a", marker)
        cache._opened_state().maintain()
        assert not any(marker.encode() in file.read_bytes() for file in tmp_path.iterdir())
        assert answers(cache.responses, ["other"]) == ["other"]


def test_a_quarter_of_the_disk_is_the_most(tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path, disk_bytes=1 << 20, responses_bytes=1 << 30) as cache:
        assert isinstance(cache.responses, ResponseStore)
        for number in range(60):
            text = "".join(chr(0x4E00 + (number * 31 + place * 7919) % 20000) for place in range(6000))
            cache.responses.put(make(f"r{number}", text))
        assert total_bytes(cache.responses) <= 1 << 18


@pytest.fixture
def turn_store(database: Database | None) -> Open:
    """Open a turn_store with these limits."""
    used = database or memory()
    return lambda refuses=None, seconds=None, total=1 << 20, tenant=1 << 20: ToolTurnStore(
        used, StoreLimits(total, tenant, seconds), refuses
    )


def made(tenant: str = "a", agent: str = "x", session: str = "s", body: str = "{}", age: float = 0.0) -> StoredTurn:
    turn = new_turn(tenant, agent, session, body)
    return StoredTurn(turn.id, tenant, agent, session, time.time() - age, body)


def turns_of(turn_store: ToolTurnStore, tenant: str = "a", agent: str = "x") -> list[StoredTurn]:
    return turn_store.read(tenant, agent, turn_store.ids(tenant, agent))


def test_what_is_put_comes_back_to_its_agent_alone(turn_store: Open) -> None:
    opened = turn_store()
    assert turns_of(opened) == []
    turns = [made(body=f'{{"n": {n}, "text": "wörld"}}') for n in range(3)]
    assert all(opened.put(turn) for turn in turns)
    assert turns_of(opened) == turns  # before it is written
    assert opened.read("a", "y", [turns[0].id]) == opened.read("b", "x", [turns[0].id]) == []
    opened.maintain()
    assert turns_of(opened) == turns
    assert turns_of(opened, "b") == [] and turns_of(opened, "a", "y") == []
    assert opened.read("b", "x", [turns[0].id]) == []
    opened.put(last := made())
    assert turns_of(opened) == [*turns, last]
    opened.maintain()
    opened.flush()
    assert turns_of(opened) == [*turns, last]


@pytest.mark.parametrize("written", [True, False])
def test_deletions_take_turns_along(turn_store: Open, written: bool) -> None:
    opened = turn_store()
    first, other = made(body='{"a": "secret \\"word\\""}'), made(session="t")
    old, theirs = made(session="u", age=100.0), made("b")
    for turn in (first, other, old, theirs):
        opened.put(turn)
    if written:
        opened.maintain()
    before = opened.generation
    assert forget(opened, select(session="nobody")) == 0 and opened.generation == before
    assert forget(opened, select(text='secret "word"', decode=lambda ids: "")) == 1
    assert forget(opened, select(session="t", tenant="b")) == 0
    assert forget(opened, select(older_than=50)) == 1
    assert turns_of(opened) == [other] and opened.generation > before
    assert forget(opened, select(session="t")) == 1
    assert forget(opened, select(tenant="a")) == 0 and turns_of(opened, "b") == [theirs]
    assert forget(opened, select(tenant="b")) == 1
    opened.maintain()
    assert turns_of(opened) == turns_of(opened, "b") == []


def test_a_short_term_is_kept(turn_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = turn_store(seconds=60.0)
    opened.maintain()
    opened.put(made(age=30.0))
    opened.maintain()
    wall, ticks = time.time, time.monotonic
    monkeypatch.setattr(time, "time", lambda: wall() + 40.0)
    monkeypatch.setattr(time, "monotonic", lambda: ticks() + 40.0)
    opened.maintain()
    assert turns_of(opened) == []


def test_refused_and_huge_turns_are_not_kept(turn_store: Open) -> None:
    opened = turn_store(refuses=lambda text: "sk-" in text)
    assert not opened.put(made(body="sk-1")) and not opened.put(made(body="x" * 70_000)) and turns_of(opened) == []


def test_an_agent_keeps_its_newest_turns(turn_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "MOST_TURNS", 8)
    opened = turn_store()
    turns = [made(age=100.0 - n) for n in range(9)]
    for turn in turns:
        opened.put(turn)
    opened.maintain()
    found = turns_of(opened)
    assert 4 <= len(found) <= 5 and found == turns[-len(found) :]


@pytest.mark.parametrize("limits", [{"total": 40_000}, {"tenant": 20_000}])
def test_a_tenant_with_many_agents_loses_its_own(
    turn_store: Open, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]
) -> None:
    """Each of them is smaller than the one agent of another tenant."""
    opened = turn_store(**limits)
    theirs = [made("b", age=100.0 - n) for n in range(20)]
    for turn in theirs:
        opened.put(turn)
    for n in range(60):
        noise = "".join(chr(0x4E00 + (n * 31 + place * 7919) % 20000) for place in range(400))
        opened.put(made(agent=f"x{n}", body=noise))
    opened.maintain()
    assert turns_of(opened, "b") == theirs
    assert 0 < sum(len(turns_of(opened, agent=f"x{n}")) for n in range(60)) < 60


def test_a_damaged_row_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    database = SqliteDatabase(tmp_path)
    database.connect()
    prepare(database)
    opened = ToolTurnStore(database, StoreLimits(1 << 20, 1 << 20, None))
    turns = [made(age=10.0 - n) for n in range(3)]
    for turn in turns:
        opened.put(turn)
    opened.maintain()
    with database.writing() as connection:
        table = tool_turns
        connection.execute(table.update().where(table.c.id == turns[1].id).values(body=b"no zlib"))
    assert turns_of(opened) == [turns[0], turns[2]]
    assert turns[1].id in caplog.text
    database.close()


def test_turns_are_in_the_caches_database(tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path) as cache:
        cache.tool_turns.put(first := made(body='{"text": "a word to find"}'))
    with SuffixCache.open(tmp_path, refuse_patterns=["sk-"]) as cache:
        assert turns_of(cache.tool_turns) == [first]
        assert not cache.tool_turns.put(made(body="sk-1"))
        cache.tool_turns.put(made(session="gone"))
        cache.flush()
        cache.forget(session="gone")
        assert turns_of(cache.tool_turns) == [first]
        cache.forget(session="s")
        assert turns_of(cache.tool_turns) == []
    assert not any(b"word to find" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def test_a_closed_cache_keeps_and_finds_nothing(tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path) as cache:
        assert cache.tool_turns.put(made())
    assert not cache.tool_turns.put(made())
    with pytest.raises(CacheClosedError):
        turns_of(cache.tool_turns)


def test_a_database_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sqlalchemy import exc

    database = SqliteDatabase(tmp_path)
    database.connect()
    prepare(database)
    opened = ToolTurnStore(database, StoreLimits(1 << 20, 1 << 20, None))
    opened.put(turn := made())

    def fails() -> Any:
        raise exc.OperationalError("", {}, Exception("disk full"))

    with monkeypatch.context() as patched:
        patched.setattr(database, "writing", fails)
        with pytest.raises(CacheUnavailableError, match="disk full"):
            opened.maintain()
    opened.maintain()
    assert turns_of(opened) == [turn]
    database.close()


@pytest.mark.parametrize("location", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)], indirect=True)
def test_what_waits_is_forgotten_by_another_process_too(location: str | Path) -> None:
    with SuffixCache.open(location) as one, SuffixCache.open(location) as other:
        stop(one)
        put = [made(session=session) for session in ("s1", "s1", "s2")]
        assert all(one.tool_turns.put(turn) for turn in put)
        other.forget(session="s1")
        one._opened_state().note_deletions()  # as twice a second
        one.tool_turns.put(later := made(session="s1"))
        one.flush()
        assert turns_of(other.tool_turns) == [put[2], later]


def stop(cache: SuffixCache) -> None:
    """Write only what is asked for."""
    assert cache._maintenance is not None
    cache._maintenance.close()


def test_what_fails_beside_it_keeps_no_turn_from_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object) -> None:
        raise CacheUnavailableError("a damaged table")

    monkeypatch.setattr(ResponseStore, "maintain", fail)
    with SuffixCache.open(tmp_path) as cache:
        assert isinstance(cache.tool_turns, ToolTurnStore)
        cache.tool_turns.put(made())
        with pytest.raises(CacheUnavailableError):
            cache._opened_state().maintain()
        assert not cache.tool_turns._waiting
