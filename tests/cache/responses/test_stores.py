"""Both stores of responses: what they keep, their bounds, and what a deletion leaves."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from agentspec.cache import SuffixCache
from agentspec.cache.deletion import select
from agentspec.cache.responses import ResponseLimits, StoredResponse
from agentspec.cache.responses import stored as stored_module
from agentspec.cache.responses.table import ResponseStore
from agentspec.cache.storage.database import Database
from agentspec.cache.storage.sqlite import MemoryDatabase, SqliteDatabase
from agentspec.cache.storage.tables import prepare
from agentspec.cache.tool_turns import new_turn

Open = Callable[..., Any]


def memory() -> MemoryDatabase:
    database = MemoryDatabase()
    prepare(database)
    return database


@pytest.fixture
def store(database: Database | None) -> Open:
    """Open a store with these limits."""
    used = database or memory()
    return lambda **limits: ResponseStore(used, ResponseLimits(**limits))


@pytest.fixture(params=["memory", "sqlite"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    """Where a cache may be kept."""
    return tmp_path if request.param == "sqlite" else None


def make(id: str, text: str = "hello", tenant: str = "a", **fields: Any) -> StoredResponse:
    item = {"id": f"msg_{id}", "type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    given = {"created_at": time.time(), "response": {"id": id, "output": []}, "items": [item], **fields}
    return StoredResponse(id, tenant, **given)


def kept(store: ResponseStore, ids: Any, tenant: str = "a") -> list[str]:
    return [id for id in ids if store.get(tenant, id) is not None]


def test_what_is_put_comes_back(store: Open) -> None:
    opened = store()
    first, second = make("r1", "wörld\0"), make("r2", session="s", previous="r1")
    assert opened.get("a", "r1") is None and not opened.delete("a", "r1") and opened.total_bytes() == 0
    assert opened.put(first) and opened.put(second) and opened.put(second)
    assert opened.get("a", "r1") == first and opened.get("a", "r2") == second
    assert opened.get("b", "r1") is None and not opened.delete("b", "r1")
    assert opened.delete("a", "r1") and not opened.delete("a", "r1") and kept(opened, ["r1", "r2"]) == ["r2"]


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
    assert opened.total_bytes() <= 200_000
    found = kept(opened, (f"a{number}" for number in range(100)))
    assert 10 < len(found) < 100 and found == [f"a{number}" for number in range(100 - len(found), 100)]
    assert kept(opened, ["b0"], "b") == ["b0"]
    assert not opened.put(make("large", os.urandom(50_000).hex())), "one of an eighth of the bound is not stored"


def test_what_could_not_be_read_again_is_not_stored(store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is small, compressed, and large again when it is read."""
    monkeypatch.setattr(stored_module, "MOST_UNPACKED", 100_000)
    opened = store()
    assert opened.put(make("fits", "a" * 90_000)) and not opened.put(make("large", "a" * 100_001))
    assert kept(opened, ["fits", "large"]) == ["fits"]


def test_a_tenants_bound_takes_only_its_own(store: Open) -> None:
    opened = store(total=1 << 20, tenant=20_000)
    opened.put(make("b0", tenant="b"))
    for number in range(60):
        opened.put(make(f"a{number}", created_at=time.time() + number / 1000))
    assert kept(opened, ["b0"], "b") == ["b0"] and opened.total_bytes() <= 21_000
    assert kept(opened, ["a59"]) == ["a59"] and kept(opened, ["a0"]) == []


def test_what_is_too_old_goes(store: Open) -> None:
    opened = store(seconds=100.0)
    opened.put(make("old", created_at=time.time() - 99.9))
    opened.put(make("new"))
    opened.put(make("older", created_at=time.time() - 200))
    assert kept(opened, ["older"]) == []
    opened.maintain()
    assert kept(opened, ["new"]) == ["new"]


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
    opened.forget(select(**conditions))
    found = [*kept(opened, ["a1", "a2"]), *kept(opened, ["b1"], "b")]
    assert found == left


@pytest.mark.parametrize("text", ['say "hi"\nthere', "café", "name"])
def test_a_search_looks_into_arguments_and_names(store: Open, text: str) -> None:
    opened = store()
    arguments = json.dumps({"code": 'say "hi"\nthere café', "name": 1})
    call = {"id": "c", "type": "function_call", "arguments": arguments}
    for id, one in (("whole", call), ("cut", call | {"arguments": arguments[:-1]})):
        opened.put(make(id, response={"id": id, "output": [one]}))
    opened.put(make("other", response={"id": "other", "output": [], "metadata": {"other": "x"}}))
    assert opened.forget(select(text=text, decode=str)) == 2
    assert kept(opened, ["whole", "cut", "other"]) == ["other"]


def test_what_a_pattern_refuses_is_not_stored(location: Path | None) -> None:
    with SuffixCache.open(location, refuse_patterns=["sk-[0-9]+"]) as cache:
        escaped = json.dumps({"key": "\u0073k-1"}, ensure_ascii=True)
        assert not cache.responses.put(make("r1", "my sk-12 key"))
        assert not cache.responses.put(make("r2", response={"output": [{"arguments": escaped}]}))
        assert cache.responses.put(make("r3", "my key"))
        assert kept(cache.responses, ["r1", "r2", "r3"]) == ["r3"]


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
def test_what_was_forgotten_meanwhile_is_not_stored(location: Path | None, conditions: Any, refused: list[str]) -> None:
    """A store that is slow, or has a queue, comes to an answer after the deletion that covers it."""
    now = time.time()
    answers = {
        "whole": make("whole", session="s", created_at=now),
        "old": make("old", tenant="c", created_at=now - 100),
        "under way": make("under way", session="s", created_at=now + 100, begun=now),
        "later": make("later", session="s", created_at=now + 100),
    }
    with SuffixCache.open(location) as cache:
        cache.forget(**conditions)
        assert [id for id, one in answers.items() if not cache.responses.put(one)] == refused
        assert cache.responses.put(make("new", session="s"))


@pytest.mark.parametrize("hours", [-2, 2])
@pytest.mark.parametrize("when", ["before the deletion", "after it"])
def test_a_clock_that_is_set_hides_no_deletion(
    location: Path | None, monkeypatch: pytest.MonkeyPatch, hours: int, when: str
) -> None:
    clock, begun = time.time, time.monotonic()
    with SuffixCache.open(location) as cache:
        turn = new_turn("a", "agent", "s", "a secret")
        cache.tool_turns.put(turn)
        for step in ("before the deletion", "after it"):
            if step == "after it":
                with SuffixCache.open(location) if location else nullcontext(cache) as other:
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
    opened = ResponseStore(database, ResponseLimits(total=100_000))
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
    assert 0 < len(kept(opened, (f"b{number}" for number in range(40)), "b")) < 40
    database.close()


def test_a_cache_forgets_and_bounds_its_responses(tmp_path: Path) -> None:
    secret = "zq" * 40
    with SuffixCache.open(tmp_path, responses_bytes=1 << 20, disk_bytes=8 << 20) as cache:
        assert cache.responses.put(make("r1", response={"id": "r1", "output": [], "x": secret}))
        assert cache.responses.put(make("r2", tenant="b"))
        cache.forget(tenant="a")
        assert kept(cache.responses, ["r1"]) == [] and kept(cache.responses, ["r2"], "b") == ["r2"]
    with SuffixCache.open(tmp_path, retention=0.001) as cache:
        time.sleep(0.01)
        assert kept(cache.responses, ["r2"], "b") == []


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
        cache.responses.maintain()
        assert not any(marker.encode() in file.read_bytes() for file in tmp_path.iterdir())
        assert kept(cache.responses, ["other"]) == ["other"]


def test_a_quarter_of_the_disk_is_the_most(tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path, disk_bytes=1 << 20, responses_bytes=1 << 30) as cache:
        assert isinstance(cache.responses, ResponseStore)
        for number in range(60):
            text = "".join(chr(0x4E00 + (number * 31 + place * 7919) % 20000) for place in range(6000))
            cache.responses.put(make(f"r{number}", text))
        assert cache.responses.total_bytes() <= 1 << 18
