"""What a deletion leaves to be done: erasures that others hold up, the log, and who is to be informed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from agentspec.cache import SuffixCache, lifetime
from agentspec.cache.deletion import Scope, select
from agentspec.cache.storage import database as database_module
from agentspec.cache.storage import deletion_log
from agentspec.cache.storage.database import Database, PendingErasure
from agentspec.cache.storage.schema import deletions
from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.cache.storage.sqlite import SqliteDatabase
from agentspec.errors import CacheError, CacheUnavailableError
from agentspec.types import Namespace


class Recording(SqliteDatabase):
    """A database that counts how often it was written anew."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.rewritten = 0
        self.in_use = False

    def secure_erase(self, *, rewrite: bool) -> bool:
        if rewrite and self.in_use:
            return False
        self.rewritten += rewrite
        return True


@pytest.mark.parametrize("overwrites", [True, False])
def test_what_others_used_is_rewritten_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, overwrites: bool
) -> None:
    """A server's plain VACUUM, which comes next, leaves the bytes of deleted rows where they are."""
    now = 1000.0
    monkeypatch.setattr(database_module.time, "monotonic", lambda: now)
    database = Recording(tmp_path)
    database.overwrites = overwrites
    database.in_use = True
    erasure = PendingErasure(database)
    erasure.mark(rewrite=True)
    erasure.finish(rewrite_within=1 << 20)
    assert erasure and ("every minute" in caplog.text) is not overwrites
    erasure.finish()
    assert not erasure and not database.rewritten
    now += 61.0
    assert bool(erasure) is not overwrites
    database.in_use = False
    erasure.finish()
    assert not erasure and database.rewritten == (not overwrites)
    database.close()


def test_a_database_is_written_anew_though_it_was_swept_in_between(tmp_path: Path) -> None:
    """As by the maintenance thread, between a deletion and the erasure that ends it."""
    store = SequenceStore.open(tmp_path, disk_bytes=None, mode="writer")
    rewritten: list[bool] = []
    erase = store.database.secure_erase

    def noted(*, rewrite: bool) -> bool:
        rewritten.append(rewrite)
        return erase(rewrite=rewrite)

    store.database.secure_erase = noted  # type: ignore[method-assign]
    store._erasure.mark(rewrite=True)
    for rewrite in (False, True, True):
        store.secure_erase(rewrite=rewrite)
    assert rewritten == [False, True]
    store.close()


def test_the_log_grows_no_more_than_it_must(database: Database | None) -> None:
    """A process that has not looked for long takes anything to be deleted, and nobody else does."""
    if database is None:
        pytest.skip("memory has no log")
    for number in range(3):
        with database.writing() as connection:
            rows = [{"created_at": time.time(), "tenant": "x", "searched": False}] * 900
            connection.execute(deletions.insert(), rows)
            last = deletion_log.log(connection, select(session="s").scope)
            logged = deletion_log.since(connection, 0)
            assert (len(logged), logged[-1][0]) == (1001 if number else 901, last)
            asks = [number for number, scope in logged if scope.searched and scope.concerns(Namespace("any"))]
            assert asks == ([logged[0][0]] if number else [])
            assert [number for number, _ in deletion_log.since(connection, last - 2)] == [last - 1, last]


def record(cache: SuffixCache, *sessions: str) -> None:
    for number, session in enumerate(sessions):
        with cache.request([number], session=session) as request:
            request.extend([1, 2, number + 3])


def test_a_deletion_that_the_database_interrupts_is_applied_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Scope] = []
    monkeypatch.setattr(lifetime, "_MAINTENANCE_SECONDS", 1e6)  # it is this call that fails, and not the thread's
    with SuffixCache.open(tmp_path) as cache:
        record(cache, "a", "b")
        cache.on_forget(told.append)
        failures: Iterable[None] = iter([None])
        stored = SequenceStore.stored

        def fails_once(store: SequenceStore, numbers: Sequence[int]) -> set[int]:
            for _ in failures:
                raise CacheUnavailableError("the connection was lost")
            return stored(store, numbers)

        monkeypatch.setattr(SequenceStore, "stored", fails_once)
        with pytest.raises(CacheError, match="connection was lost"):
            cache.forget(session="a")
        cache.forget(session="nobody")
        assert cache.stats().sequences == 1, "the deleted one would be drafted until the process ends"
        assert [scope.covers("a", 0.0) for scope in told] == [True, False]


def test_listeners_that_raise_forget_or_leave_hold_nothing_up(location: str | Path) -> None:
    told: list[str] = []
    with SuffixCache.open(location) as cache:
        record(cache, "a", "b", "c")

        def fails(scope: Scope) -> None:
            told.append("fails")
            raise ValueError("of its own")

        def forgets(scope: Scope) -> None:
            told.append("forgets")
            if scope.covers("a", 0.0):
                cache.forget(session="b")
                end()

        cache.on_forget(fails)
        end = cache.on_forget(forgets)
        deleting = threading.Thread(target=lambda: cache.forget(session="a"))
        deleting.start()
        deleting.join(60)
        assert not deleting.is_alive() and cache.stats().sequences == 1
        assert told == ["fails", "forgets", "fails", "forgets"]
        end()
        cache.forget(session="c")
        assert told[4:] == ["fails"]
