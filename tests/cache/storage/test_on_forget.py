"""Who derives something from deleted text is told, once it is deleted and whatever fails meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from agentspec.cache import SuffixCache, suffix_cache
from agentspec.cache.deletion import Scope
from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.errors import CacheError, CacheUnavailableError


def record(cache: SuffixCache, *sessions: str) -> None:
    for number, session in enumerate(sessions):
        with cache.request([number], session=session) as request:
            request.extend([1, 2, number + 3])


def test_a_deletion_that_the_database_interrupts_is_applied_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Scope] = []
    monkeypatch.setattr(suffix_cache, "_MAINTENANCE_SECONDS", 1e6)  # it is this call that fails, and not the thread's
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
