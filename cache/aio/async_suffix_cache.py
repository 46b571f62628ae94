"""The cache for asyncio: what may wait for the disk runs in a thread, and the event loop goes on."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from agentspec.cache.suffix_cache import CacheRequest, SuffixCache

P = ParamSpec("P")
T = TypeVar("T")


async def _made(make: Callable[[], T], undo: Callable[[T], object]) -> T:
    """What `make` returns in a thread. Where the caller is cancelled meanwhile, `undo` gets it, in a thread too."""
    work = asyncio.get_running_loop().run_in_executor(None, make)

    def give_back(done: asyncio.Future[T]) -> None:
        if not done.cancelled() and done.exception() is None:
            # A thread of its own: at the end of `asyncio.run` the loop's threads take no more work.
            threading.Thread(target=undo, args=(done.result(),), name="agentspec-cache-undo").start()

    try:
        await asyncio.wait([work])  # unlike awaiting `work`, leaves it alone when cancelled
    except asyncio.CancelledError:
        work.add_done_callback(give_back)
        raise
    return work.result()


def _in_thread(
    method: Callable[Concatenate[SuffixCache, P], T],
) -> Callable[Concatenate[AsyncSuffixCache, P], Coroutine[Any, Any, T]]:
    @functools.wraps(method)
    async def call(self: AsyncSuffixCache, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(method, self.cache, *args, **kwargs)

    return call


def _opening(open_: Callable[P, SuffixCache]) -> Callable[P, Coroutine[Any, Any, AsyncSuffixCache]]:
    @functools.wraps(open_)
    async def call(*args: P.args, **kwargs: P.kwargs) -> AsyncSuffixCache:
        return AsyncSuffixCache(await _made(functools.partial(open_, *args, **kwargs), SuffixCache.close))

    return call


def _beginning(
    method: Callable[Concatenate[SuffixCache, P], CacheRequest],
) -> Callable[Concatenate[AsyncSuffixCache, P], Coroutine[Any, Any, CacheRequest]]:
    @functools.wraps(method)
    async def call(self: AsyncSuffixCache, /, *args: P.args, **kwargs: P.kwargs) -> CacheRequest:
        return await _made(functools.partial(method, self.cache, *args, **kwargs), CacheRequest.abandon)

    return call


class AsyncSuffixCache:
    """A `SuffixCache` for asyncio. Its methods have the arguments, results and errors of those of `SuffixCache`.

    What `request` returns is the same `CacheRequest`, and its calls, like those of batches, are no coroutines: they
    wait for no disk, and handing them to a thread would take longer than most of them do.

    A cancelled `open` or `request` leaves nothing open, and a cancelled `close` closes. What else has begun when its
    caller is cancelled goes on to its end in its thread.
    """

    def __init__(self, cache: SuffixCache) -> None:
        self.cache = cache
        """The same cache for threads."""
        self.draft_batch = cache.draft_batch
        self.extend_batch = cache.extend_batch
        self.close_batch = cache.close_batch

    open = staticmethod(_opening(SuffixCache.open))
    request = _beginning(SuffixCache.request)
    forget = _in_thread(SuffixCache.forget)
    flush = _in_thread(SuffixCache.flush)
    compact = _in_thread(SuffixCache.compact)
    stats = _in_thread(SuffixCache.stats)
    check_integrity = _in_thread(SuffixCache.check_integrity)

    async def close(self) -> None:
        """Write what is not on disk yet and release the database. Open requests raise from now on. Idempotent."""
        await _made(self.cache.close, lambda _: None)

    async def __aenter__(self) -> AsyncSuffixCache:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
