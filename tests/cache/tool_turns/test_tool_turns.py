"""Both stores of turns: what they keep, their bounds, and what a deletion leaves."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentspec.cache import SuffixCache
from agentspec.cache.deletion import select
from agentspec.cache.responses.table import ResponseStore
from agentspec.cache.storage.database import Database
from agentspec.cache.storage.sqlite import MemoryDatabase, SqliteDatabase
from agentspec.cache.storage.tables import prepare
from agentspec.cache.tool_turns import StoredTurn, new_turn
from agentspec.cache.tool_turns import table as table_module
from agentspec.cache.tool_turns.table import ToolTurnStore
from agentspec.errors import CacheClosedError, CacheUnavailableError

Open = Callable[..., Any]


def memory() -> MemoryDatabase:
    database = MemoryDatabase()
    prepare(database)
    return database


@pytest.fixture
def store(database: Database | None) -> Open:
    """Open a store with these limits."""
    used = database or memory()
    return lambda refuses=None, seconds=None, total=1 << 20, tenant=1 << 20: ToolTurnStore(
        used, refuses, seconds, total, tenant
    )


def made(tenant: str = "a", agent: str = "x", session: str = "s", body: str = "{}", age: float = 0.0) -> StoredTurn:
    turn = new_turn(tenant, agent, session, body)
    return StoredTurn(turn.id, tenant, agent, session, time.time() - age, body)


def kept(store: ToolTurnStore, tenant: str = "a", agent: str = "x") -> list[StoredTurn]:
    return store.read(tenant, agent, store.ids(tenant, agent))


def test_what_is_put_comes_back_to_its_agent_alone(store: Open) -> None:
    opened = store()
    assert kept(opened) == []
    turns = [made(body=f'{{"n": {n}, "text": "wörld"}}') for n in range(3)]
    assert all(opened.put(turn) for turn in turns)
    assert kept(opened) == turns  # before it is written
    assert opened.read("a", "y", [turns[0].id]) == opened.read("b", "x", [turns[0].id]) == []
    opened.maintain()
    assert kept(opened) == turns
    assert kept(opened, "b") == [] and kept(opened, "a", "y") == []
    assert opened.read("b", "x", [turns[0].id]) == []
    opened.put(last := made())
    assert kept(opened) == [*turns, last]
    opened.maintain()
    opened.flush()
    assert kept(opened) == [*turns, last]


@pytest.mark.parametrize("written", [True, False])
def test_deletions_take_turns_along(store: Open, written: bool) -> None:
    opened = store()
    first, other = made(body='{"a": "secret \\"word\\""}'), made(session="t")
    old, theirs = made(session="u", age=100.0), made("b")
    for turn in (first, other, old, theirs):
        opened.put(turn)
    if written:
        opened.maintain()
    before = opened.generation
    assert opened.forget(select(session="nobody")) == 0 and opened.generation == before
    assert opened.forget(select(text='secret "word"', decode=lambda ids: "")) == 1
    assert opened.forget(select(session="t", tenant="b")) == 0
    assert opened.forget(select(older_than=50)) == 1
    assert kept(opened) == [other] and opened.generation > before
    assert opened.forget(select(session="t")) == 1
    assert opened.forget(select(tenant="a")) == 0 and kept(opened, "b") == [theirs]
    assert opened.forget(select(tenant="b")) == 1
    opened.maintain()
    assert kept(opened) == kept(opened, "b") == []


def test_turns_age(store: Open) -> None:
    opened = store(seconds=60.0)
    opened.put(made(age=100.0))
    opened.put(young := made())
    opened.maintain()
    assert kept(opened) == [young]


def test_a_short_term_is_kept(store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = store(seconds=60.0)
    opened.maintain()
    opened.put(made(age=30.0))
    opened.maintain()
    wall, ticks = time.time, time.monotonic
    monkeypatch.setattr(time, "time", lambda: wall() + 40.0)
    monkeypatch.setattr(time, "monotonic", lambda: ticks() + 40.0)
    opened.maintain()
    assert kept(opened) == []


def test_refused_and_huge_turns_are_not_kept(store: Open) -> None:
    opened = store(refuses=lambda text: "sk-" in text)
    assert not opened.put(made(body="sk-1")) and not opened.put(made(body="x" * 70_000)) and kept(opened) == []


def test_an_agent_keeps_its_newest_turns(store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "MOST", 8)
    opened = store()
    turns = [made(age=100.0 - n) for n in range(9)]
    for turn in turns:
        opened.put(turn)
    opened.maintain()
    found = kept(opened)
    assert 4 <= len(found) <= 5 and found == turns[-len(found) :]


def test_a_tenant_with_much_loses_its_own(tmp_path: Path) -> None:
    database = SqliteDatabase(tmp_path)
    database.connect()
    prepare(database)
    opened = ToolTurnStore(database, None, None, 1 << 20, 4000)
    opened.put(small := made("b"))
    for n in range(40):
        opened.put(made(age=100.0 - n))
    opened.maintain()
    assert 0 < len(kept(opened)) <= 4000 // 256 and kept(opened, "b") == [small]
    database.close()


@pytest.mark.parametrize("limits", [{"total": 40_000}, {"tenant": 20_000}])
def test_a_tenant_with_many_agents_loses_its_own(
    store: Open, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]
) -> None:
    """Each of them is smaller than the one agent of another tenant."""
    opened = store(**limits)
    theirs = [made("b", age=100.0 - n) for n in range(20)]
    for turn in theirs:
        opened.put(turn)
    for n in range(60):
        noise = "".join(chr(0x4E00 + (n * 31 + place * 7919) % 20000) for place in range(400))
        opened.put(made(agent=f"x{n}", body=noise))
    opened.maintain()
    assert kept(opened, "b") == theirs
    assert 0 < sum(len(kept(opened, agent=f"x{n}")) for n in range(60)) < 60


def test_a_damaged_row_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    database = SqliteDatabase(tmp_path)
    database.connect()
    prepare(database)
    opened = ToolTurnStore(database, None, None, 1 << 20, 1 << 20)
    turns = [made(age=10.0 - n) for n in range(3)]
    for turn in turns:
        opened.put(turn)
    opened.maintain()
    with database.writing() as connection:
        table = table_module.tool_turns
        connection.execute(table.update().where(table.c.id == turns[1].id).values(body=b"no zlib"))
    assert kept(opened) == [turns[0], turns[2]]
    assert turns[1].id in caplog.text
    database.close()


def test_turns_are_in_the_caches_database(tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path) as cache:
        cache.tool_turns.put(first := made(body='{"text": "a word to find"}'))
    with SuffixCache.open(tmp_path, refuse_patterns=["sk-"]) as cache:
        assert kept(cache.tool_turns) == [first]
        assert not cache.tool_turns.put(made(body="sk-1"))
        cache.tool_turns.put(made(session="gone"))
        cache.flush()
        cache.forget(session="gone")
        assert kept(cache.tool_turns) == [first]
        cache.forget(session="s")
        assert kept(cache.tool_turns) == []
    assert not any(b"word to find" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def test_a_closed_cache_keeps_and_finds_nothing(tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path) as cache:
        assert cache.tool_turns.put(made())
    assert not cache.tool_turns.put(made())
    with pytest.raises(CacheClosedError):
        kept(cache.tool_turns)


def test_a_cache_in_memory_forgets_turns_too() -> None:
    with SuffixCache.open() as cache:
        cache.tool_turns.put(made())
        cache.forget(tenant="a")
        assert kept(cache.tool_turns) == []


def test_a_database_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sqlalchemy import exc

    database = SqliteDatabase(tmp_path)
    database.connect()
    prepare(database)
    opened = ToolTurnStore(database, None, None, 1 << 20, 1 << 20)
    opened.put(turn := made())

    def fails() -> Any:
        raise exc.OperationalError("", {}, Exception("disk full"))

    with monkeypatch.context() as patched:
        patched.setattr(database, "writing", fails)
        with pytest.raises(CacheUnavailableError, match="disk full"):
            opened.maintain()
    opened.maintain()
    assert kept(opened) == [turn]
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
        assert kept(other.tool_turns) == [put[2], later]


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
