from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from agentspec.reasoning.event_sink import EventSink

pytestmark = pytest.mark.anyio


async def test_events_arrive_in_order_and_wait_for_their_reader() -> None:
    sink, emitted = EventSink[int](), list[int]()

    async def run() -> None:
        for number in range(3):
            emitted.append(number)
            await sink.emit(number)

    async with aclosing(sink.stream(run)) as events:
        async for event in events:
            for _ in range(5):
                await asyncio.sleep(0)
            assert emitted == list(range(event + 1))  # nothing runs ahead of the reader
    assert emitted == [0, 1, 2]


async def test_what_is_raised_comes_after_the_events() -> None:
    sink, seen = EventSink[str](), list[str]()

    async def run() -> None:
        await sink.emit("one")
        raise ValueError("two")

    with pytest.raises(ValueError, match="two"):
        async for event in sink.stream(run):
            seen.append(event)
    assert seen == ["one"]


@pytest.mark.parametrize("waits", ["for its reader", "for a model"])
async def test_closing_the_iterator_cancels_the_work_and_waits_for_its_end(waits: str) -> None:
    sink, ended = EventSink[str](), list[str]()

    async def run() -> None:
        try:
            await sink.emit("one")
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    events = sink.stream(run)
    assert await anext(events) == "one"
    if waits == "for a model":
        task = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await events.aclose()
    assert ended == ["cleaned up"]
