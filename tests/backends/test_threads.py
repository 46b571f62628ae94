"""Threads that tenants share, and how many of the C library's heaps they use."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from types import SimpleNamespace

import pytest

from agentspec.backends.threads import TenantThreads, share_heaps
from agentspec.errors import ShuttingDownError

PROGRAM = """
import ctypes, threading
from agentspec.backends.threads import share_heaps

share_heaps()
library, wait = ctypes.CDLL(None), threading.Barrier(13)
library.malloc.restype = library.fopen.restype = ctypes.c_void_p

def work():
    library.malloc(1000)
    wait.wait()
    wait.wait()

threads = [threading.Thread(target=work) for _ in range(12)]
[thread.start() for thread in threads]
wait.wait()
file = ctypes.c_void_p(library.fopen(b"/dev/fd/1", b"w"))
library.malloc_info(0, file)
library.fclose(file)
wait.wait()
[thread.join() for thread in threads]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
@pytest.mark.parametrize(("environment", "most"), [({}, 4), ({"MALLOC_ARENA_MAX": "2"}, 2)], ids=["few", "as it says"])
def test_threads_share_few_heaps(environment: dict[str, str], most: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    assert 1 < done.stdout.count("<heap ") <= most


def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace())
    share_heaps()


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
