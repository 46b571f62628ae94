"""Stored answers and turns have a database of their own: what cannot be made again is not started without."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from agentspec.cache import SuffixCache
from agentspec.cache.responses import StoredResponse
from agentspec.cache.storage.sqlite import DATABASE, STATE
from agentspec.cache.tool_turns import new_turn
from agentspec.errors import CacheDamagedError, CacheError, CacheVersionError


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
