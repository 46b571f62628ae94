"""The cache for asyncio: the loop's thread does no blocking work, and a cancelled call leaves nothing behind."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from agentspec.cache import AsyncSuffixCache, SuffixCache
from agentspec.cache.namespaces import NamespaceTable
from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.cache.sync import StoreSync
from agentspec.errors import CacheClosedError, CacheError, CacheLockedError, ConfigurationError, InvalidRequestError

pytestmark = pytest.mark.anyio

ON_THE_LOOP = {"draft_batch", "extend_batch", "close_batch"}
BY_THE_CACHE = {"responses", "tool_turns", "usage", "on_forget", "path", "closed", "tenant_bytes", "leave_behind"}


@pytest.fixture
def statements() -> Iterator[Counter[int]]:
    """SQL statements by thread."""
    counts: Counter[int] = Counter()

    def executed(*_: object) -> None:
        counts[threading.get_ident()] += 1

    event.listen(sa.Engine, "before_cursor_execute", executed)
    yield counts
    event.remove(sa.Engine, "before_cursor_execute", executed)


class Held:
    """Replaces a method by one that tells when it has begun and ended, and goes on when it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.begun, self.go, self.ended = threading.Event(), threading.Event(), threading.Event()
        original: Callable[..., Any] = inspect.getattr_static(owner, name)
        unbound = original.__func__ if isinstance(original, classmethod) else original

        def method(*args: Any, **kwargs: Any) -> Any:
            self.begun.set()
            assert self.go.wait(60)
            try:
                return unbound(*args, **kwargs)
            finally:
                self.ended.set()

        monkeypatch.setattr(owner, name, classmethod(method) if unbound is not original else method)

    async def cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task once it has begun in its thread, and let it go then."""
        await asyncio.to_thread(self.begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not self.ended.is_set()
        self.go.set()
        assert await asyncio.to_thread(self.ended.wait, 60)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("never")


async def test_drafts_what_was_remembered(tmp_path: Path) -> None:
    async with await AsyncSuffixCache.open(tmp_path) as cache:
        with await cache.request([1, 2, 3], session="s") as request:
            request.extend([4, 5, 6, 7])
        with await cache.request([9, 3, 4]) as request:
            assert request.draft(max_tokens=8).tokens.tolist() == [5, 6, 7]
            [draft] = cache.draft_batch([request], 2)
            assert draft.tokens.tolist() == [5, 6]
        await cache.flush()
        assert (await cache.stats()).sequences == 1
        assert await cache.forget(session="s") == 1
        await cache.check_integrity()
        assert await cache.compact() > 0
    assert cache.cache.closed


async def test_the_loop_executes_no_statement(location: str | Path, statements: Counter[int]) -> None:
    me = threading.get_ident()
    async with await AsyncSuffixCache.open(location) as cache:
        for tenant in ("a", "b"):
            for _ in range(2):
                request = await cache.request([1, 2, 3], namespace=tenant, session="s")
                request.draft()
                request.extend([4, 5, 6])
                cache.extend_batch([request], [[7]])
                cache.draft_batch([request])
                cache.close_batch([request])
        await cache.flush()
        await cache.stats()
        await cache.forget(tenant="a")
        await cache.compact()
    assert sum(statements.values()) > 20
    assert statements[me] == 0


async def test_errors_are_those_of_the_cache(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="mode must be"):
        await AsyncSuffixCache.open(mode="leader")  # type: ignore[arg-type]
    async with await AsyncSuffixCache.open(tmp_path) as cache:
        with pytest.raises(InvalidRequestError):
            await cache.request([-1])
        with pytest.raises(InvalidRequestError):
            await cache.forget()
        request = await cache.request([1, 2])
    with pytest.raises(CacheClosedError):
        await cache.request([1, 2])
    with pytest.raises(CacheClosedError):
        request.draft()
    with pytest.raises(CacheError):
        await cache.flush()
    await cache.close()  # again
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(cache)


async def test_a_cancelled_open_closes_what_it_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[SuffixCache] = []
    start = SuffixCache._start

    def started(cache: SuffixCache) -> None:
        opened.append(cache)
        start(cache)

    monkeypatch.setattr(SuffixCache, "_start", started)
    held = Held(monkeypatch, SequenceStore, "__init__")
    await held.cancel(asyncio.create_task(AsyncSuffixCache.open(tmp_path)))
    await until(lambda: bool(opened) and opened[0].closed)
    await until(lambda: writable(tmp_path))  # the lock is given back last


def writable(path: Path) -> bool:
    try:
        SuffixCache.open(path, mode="writer").close()
    except CacheLockedError:
        return False
    return True


async def test_a_cancelled_request_gives_its_session_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with await AsyncSuffixCache.open() as cache:
        (await cache.request([1, 2], session="s")).close()
        partition = cache.cache._pool.namespaces.partitions()[0]
        held = Held(monkeypatch, NamespaceTable, "entered")
        await held.cancel(asyncio.create_task(cache.request([1, 2], session="s")))
        await until(lambda: cache.cache.stats().requests == 2)  # it had begun, after all
        await until(lambda: not partition.sessions.busy)


async def test_a_cancelled_close_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = await AsyncSuffixCache.open(tmp_path)
    held = Held(monkeypatch, SuffixCache, "close")
    await held.cancel(asyncio.create_task(cache.close()))
    assert cache.cache.closed


async def test_a_cancelled_flush_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with await AsyncSuffixCache.open(tmp_path) as cache:
        held = Held(monkeypatch, StoreSync, "flush")
        await held.cancel(asyncio.create_task(cache.flush()))


def test_a_loop_that_ends_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SuffixCache.open()
    cache.request([1, 2], session="s").close()
    partition = cache._pool.namespaces.partitions()[0]
    held = Held(monkeypatch, NamespaceTable, "entered")

    async def leave() -> None:
        task = asyncio.create_task(AsyncSuffixCache(cache).request([1, 2], session="s"))
        await asyncio.to_thread(held.begun.wait, 60)
        threading.Timer(0.05, held.go.set).start()
        del task

    asyncio.run(leave())
    for thread in threading.enumerate():
        if thread.name == "agentspec-cache-undo":
            thread.join(60)
    assert held.ended.is_set() and not partition.sessions.busy
    cache.close()


def test_every_method_of_the_cache_is_here_or_named() -> None:
    public = {name for name in dir(SuffixCache) if not name.startswith("_")}
    with SuffixCache.open() as cache:
        for name in public - BY_THE_CACHE:
            theirs, mine = getattr(SuffixCache, name), getattr(AsyncSuffixCache(cache), name)
            assert inspect.iscoroutinefunction(mine) == (name not in ON_THE_LOOP), name
            assert _parameters(mine) == _parameters(theirs), name


def _parameters(call: Callable[..., Any]) -> list[tuple[str, Any]]:
    signature = inspect.signature(call)
    return [(name, one.default) for name, one in signature.parameters.items() if name != "self"]
