from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator

import pytest

from agentspec.errors import RequestTimeoutError, ShuttingDownError
from agentspec.proxy.admission.limits import Deadline, Deadlines, until_disconnect

pytestmark = pytest.mark.anyio


async def slowly(count: int, seconds: float, closed: list[bool]) -> AsyncIterator[int]:
    try:
        for number in range(count):
            await asyncio.sleep(seconds)
            yield number
    finally:
        closed.append(True)


async def test_items_within_the_limit_pass() -> None:
    closed: list[bool] = []
    assert [item async for item in Deadline(5).within(slowly(3, 0, closed))] == [0, 1, 2] and closed


async def test_the_limit_is_for_all_items_together() -> None:
    closed: list[bool] = []
    seen = []
    with pytest.raises(RequestTimeoutError, match=r"0\.12 seconds"):
        async for item in Deadline(0.12).within(slowly(9, 0.05, closed)):
            seen.append(item)
    assert len(seen) <= 2 and closed  # each of them alone would be in time


async def test_a_time_out_of_someone_elses_is_not_ours() -> None:
    with pytest.raises(TimeoutError) as caught:
        async with Deadline(5).limit():
            raise TimeoutError
    assert not isinstance(caught.value, RequestTimeoutError)


async def test_an_interrupt_ends_the_time_at_once_and_only_in_the_limit() -> None:
    deadline = Deadline(60)
    loop = asyncio.get_running_loop()
    loop.call_later(0.01, deadline.interrupt, ShuttingDownError("draining"))
    with pytest.raises(ShuttingDownError):
        async with deadline.limit():
            await asyncio.sleep(60)
    deadline.interrupt(ShuttingDownError("again"))
    with pytest.raises(ShuttingDownError, match="draining"):
        async with deadline.limit():
            await asyncio.sleep(60)
    await asyncio.sleep(0)
    assert not _cancellations()


async def test_a_cancellation_from_outside_passes_a_limit_and_a_watch() -> None:
    async def work() -> None:
        async with until_disconnect(asyncio.Queue().get), Deadline(60).limit():
            await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_client_that_leaves_when_the_time_is_over_counts_as_left() -> None:
    messages: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    deadline = Deadline(60)
    async with until_disconnect(messages.get) as client, deadline.limit():  # type: ignore[arg-type]
        await messages.put({"type": "http.disconnect"})
        deadline.interrupt(ShuttingDownError("draining"))
        await asyncio.sleep(60)
    assert client.left and not _cancellations()


def _cancellations() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def test_a_disconnect_cancels_the_block() -> None:
    messages: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    await messages.put({"type": "http.request"})
    reached = False
    async with until_disconnect(messages.get) as client:  # type: ignore[arg-type]
        await asyncio.sleep(0.02)
        reached = True
        await messages.put({"type": "http.disconnect"})
        await asyncio.sleep(5)
    assert reached and client.left


class Client:
    """Says nothing."""

    async def receive(self) -> dict[str, str]:
        await asyncio.get_running_loop().create_future()
        raise AssertionError


async def test_a_request_is_freed_at_its_end_without_the_garbage_collector() -> None:
    client = Client()
    freed = weakref.ref(client)
    gc.disable()
    try:
        async with until_disconnect(client.receive), Deadline(60).limit():  # type: ignore[arg-type]
            await asyncio.sleep(0)
        del client
        for _ in range(5):  # the watching task ends
            await asyncio.sleep(0)
        assert freed() is None
    finally:
        gc.enable()


async def test_an_undisturbed_block_leaves_no_task() -> None:
    before = len(asyncio.all_tasks())
    async with until_disconnect(asyncio.Queue().get) as client:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not client.left and len(asyncio.all_tasks()) == before


async def test_running_requests_can_be_interrupted() -> None:
    deadlines, closed = Deadlines(), []
    ending, seen = ShuttingDownError("over"), []
    deadline = deadlines.start(600)
    with pytest.raises(ShuttingDownError, match="over"):
        async for item in deadline.within(slowly(9, 0, closed)):
            seen.append(item)
            deadlines.interrupt(ending)
            deadlines.interrupt(RequestTimeoutError("too late"))
    assert seen == [0] and closed


async def test_an_interrupt_ends_what_waits() -> None:
    deadlines = Deadlines()
    deadline = deadlines.start(600)
    asyncio.get_running_loop().call_later(0.01, deadlines.interrupt, ShuttingDownError("over"))
    with pytest.raises(ShuttingDownError, match="over"):
        async with deadline.limit():
            await asyncio.sleep(600)


async def test_a_time_that_is_over_is_not_interrupted_again() -> None:
    deadlines = Deadlines()
    deadline = deadlines.start(0)
    with pytest.raises(RequestTimeoutError):
        async with deadline.limit():
            try:
                await asyncio.sleep(600)
            finally:
                deadline.interrupt(ShuttingDownError("over"))
