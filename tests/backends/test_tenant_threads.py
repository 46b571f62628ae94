from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from contextlib import suppress

import pytest

from agentspec.backends.tenant_threads import TenantThreads
from agentspec.errors import ShuttingDownError


@pytest.mark.anyio
async def test_tenants_take_turns() -> None:
    threads, begin, order = TenantThreads(1, "test"), threading.Event(), []
    first = asyncio.create_task(threads.run("a", begin.wait, 60))
    await asyncio.sleep(0)
    rest = [asyncio.create_task(threads.run(tenant, order.append, tenant)) for tenant in "aaabbc"]
    await asyncio.sleep(0)
    begin.set()
    await asyncio.gather(first, *rest)
    assert "".join(order) in ("abcaba", "bcabaa")
    threads.close()


@pytest.mark.anyio
async def test_work_that_is_cancelled_while_it_waits_never_runs() -> None:
    threads, begin, done = TenantThreads(1, "test"), threading.Event(), []
    first = asyncio.create_task(threads.run("a", begin.wait, 60))
    await asyncio.sleep(0)
    second = asyncio.create_task(threads.run("a", done.append, 2))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    await asyncio.sleep(0)
    begin.set()
    await first
    assert await threads.run("a", done.append, 3) is None
    assert done == [3]
    threads.close()


class Fails:
    def __call__(self) -> None:
        raise ValueError("no")


@pytest.mark.anyio
async def test_what_failed_is_not_kept_in_a_cycle() -> None:
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


def test_several_loops_share_the_threads() -> None:
    threads = TenantThreads(2, "test")
    assert [asyncio.run(threads.run("a", int, "7")) for _ in range(3)] == [7, 7, 7]
    threads.close()


@pytest.mark.anyio
async def test_what_waits_at_the_end_is_told() -> None:
    threads, begin = TenantThreads(1, "test"), threading.Event()
    first = asyncio.create_task(threads.run("a", begin.wait, 60))
    await asyncio.sleep(0)
    second = asyncio.create_task(threads.run("b", begin.wait, 60))
    await asyncio.sleep(0)
    threads.close()
    with pytest.raises(ShuttingDownError):
        await second
    with pytest.raises(ShuttingDownError):
        await threads.run("b", begin.wait, 60)
    begin.set()
    assert await first
