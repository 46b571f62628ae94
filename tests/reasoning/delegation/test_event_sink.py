"""Events of a thinking reach their reader in order, at the reader's pace."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from agentspec.reasoning.delegation.steps import Ended, Event
from agentspec.reasoning.delegation.thinking import EventSink

pytestmark = pytest.mark.anyio
ONE = Ended("one")


async def test_events_arrive_in_order_and_wait_for_their_reader() -> None:
    sink, emitted, seen = EventSink(), list[Event](), 0

    async def run() -> None:
        for number in range(3):
            emitted.append(Ended(str(number)))
            await sink.emit(emitted[-1])

    async with aclosing(sink.stream(run)) as events:
        async for event in events:
            for _ in range(5):
                await asyncio.sleep(0)
            seen += 1
            assert len(emitted) == seen and event is emitted[-1]  # nothing runs ahead of the reader
    assert seen == 3


@pytest.mark.parametrize("waits", ["for its reader", "for a model"])
async def test_closing_the_iterator_cancels_the_work_and_waits_for_its_end(waits: str) -> None:
    sink, ended = EventSink(), list[str]()

    async def run() -> None:
        try:
            await sink.emit(ONE)
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    events = sink.stream(run)
    assert await anext(events) == ONE
    if waits == "for a model":
        task = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await events.aclose()
    assert ended == ["cleaned up"]
