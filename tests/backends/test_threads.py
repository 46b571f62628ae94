"""Threads that tenants share: an algorithm of turns, which the gateway's parsing and long prompts go through."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from contextlib import suppress

import pytest

from agentspec.backends.threads import TenantThreads
from agentspec.errors import ShuttingDownError


@pytest.mark.anyio
async def test_tenants_take_turns_and_what_is_cancelled_while_it_waits_never_runs() -> None:
    threads, begin, order = TenantThreads(1, "test"), threading.Event(), list[str]()
    first = asyncio.create_task(threads.run("a", begin.wait, 60))
    await asyncio.sleep(0)
    cancelled = asyncio.create_task(threads.run("a", order.append, "x"))
    rest = [asyncio.create_task(threads.run(tenant, order.append, tenant)) for tenant in "aaabbc"]
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    begin.set()
    await asyncio.gather(first, *rest)
    assert "".join(order) in ("abcaba", "bcabaa", "bcaaba")
    threads.close()


class Fails:
    def __call__(self) -> None:
        raise ValueError("no")


@pytest.mark.anyio
async def test_what_failed_is_not_in_a_cycle() -> None:
    """Large bodies would stay in memory until the garbage collector runs."""
    threads, fails = TenantThreads(1, "test"), Fails()
    gone = weakref.ref(fails)
    gc.disable()
    try:
        with suppress(ValueError):
            await threads.run("a", fails)
        del fails
        await threads.run("a", int)
        assert gone() is None
    finally:
        gc.enable()
    threads.close()


@pytest.mark.anyio
async def test_what_waits_at_the_end_is_refused_and_what_runs_ends() -> None:
    threads, begin = TenantThreads(1, "test"), threading.Event()
    first, second = (asyncio.create_task(threads.run(tenant, begin.wait, 60)) for tenant in "ab")
    await asyncio.sleep(0)
    threads.close()
    for refused in (second, threads.run("b", begin.wait, 60)):
        with pytest.raises(ShuttingDownError):
            await refused
    begin.set()
    assert await first
