"""Slots: shares of tenants, the order of those who wait, and the end of their patience."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from typing import Any

import pytest

from agentspec.errors import OverloadedError, ShuttingDownError
from agentspec.proxy import admission
from agentspec.proxy.admission import Slots
from agentspec.settings.server import ApiKey, ServerSettings, TenantLimits

pytestmark = pytest.mark.anyio
LONG = 10_000.0


def limits(tenants: dict[str, TenantLimits] | None = None, **server: Any) -> ServerSettings:
    tenants = tenants or {}
    keys = tuple(ApiKey(tenant=name, key_env="X") for name in tenants)
    return ServerSettings(api_keys=keys, tenants=tenants, **{"queue_timeout": LONG, **server})


class Crowd:
    """Requests that run until their test ends them."""

    def __init__(self, settings: ServerSettings) -> None:
        self.slots = Slots(settings)
        self.entered: list[str] = []
        self.running: list[tuple[str, asyncio.Event]] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def send(self, tenant: str, count: int = 1, deadline_s: float | None = None) -> None:
        for _ in range(count):
            self.tasks.append(asyncio.create_task(self._request(tenant, deadline_s)))
        await settle()

    async def end(self, tenant: str) -> None:
        """End the oldest running request of a tenant."""
        found = next(one for one in self.running if one[0] == tenant)
        self.running.remove(found)
        found[1].set()
        await settle()

    def counts(self) -> Counter[str]:
        return Counter(tenant for tenant, _ in self.running)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert self.slots.running == self.slots.waiting == 0

    async def _request(self, tenant: str, deadline_s: float | None) -> None:
        async with self.slots.enter(tenant, deadline_s):
            run = (tenant, asyncio.Event())
            self.entered.append(tenant if deadline_s is None else f"{tenant}{deadline_s:g}")
            self.running.append(run)
            try:
                await run[1].wait()
            finally:
                if run in self.running:
                    self.running.remove(run)


async def settle() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


async def test_the_nearest_deadline_goes_first_and_then_who_came_first() -> None:
    crowd = Crowd(limits(max_concurrent=1))
    await crowd.send("a")
    for deadline in (None, 300.0, 100.0, 200.0):
        await crowd.send("a", deadline_s=deadline)
    while crowd.running:
        await crowd.end("a")
    assert crowd.entered == ["a", "a100", "a200", "a300", "a"]
    await crowd.close()


@pytest.mark.parametrize(("weight", "share"), [(1.0, 6), (3.0, 9), (0.2, 2)])
async def test_busy_tenants_share_by_weight(weight: float, share: int) -> None:
    """However long a tenant's requests take: it is slots that are shared."""
    crowd = Crowd(limits({"a": TenantLimits(weight=weight), "b": TenantLimits()}, max_concurrent=12))
    await crowd.send("b", 12)
    await crowd.send("a", 20)
    await crowd.send("b", 20)
    for _ in range(12):
        await crowd.end("b")
    assert crowd.counts()["a"] == share and crowd.slots.running == 12
    await crowd.close()


async def test_no_request_waits_while_its_tenant_has_a_free_slot() -> None:
    crowd = Crowd(limits({"a": TenantLimits(max_concurrent=2), "b": TenantLimits()}, max_concurrent=5))
    await crowd.send("a", 4)
    await crowd.send("b", 9)
    assert crowd.counts() == {"a": 2, "b": 3} and crowd.slots.waiting == 8
    await crowd.end("a")
    assert crowd.counts() == {"a": 2, "b": 3}
    await crowd.end("b")
    assert crowd.counts() == {"a": 2, "b": 3}
    await crowd.close()


def test_the_line_is_bounded_and_time_runs_out(in_virtual_time: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_QUEUED", 2)

    async def work() -> None:
        slots, loop = Slots(limits(max_concurrent=1, queue_timeout=5.0)), asyncio.get_running_loop()
        async with slots.enter("a"):
            waiting = [asyncio.create_task(slots.enter("a", patience).__aenter__()) for patience in (None, 2.0)]
            await settle()
            with pytest.raises(OverloadedError, match="2 wait"):
                await slots.enter("a").__aenter__()
            ended = []
            for one, seconds in zip(reversed(waiting), (2, 5), strict=True):
                with pytest.raises(OverloadedError, match="queue_timeout"):
                    await one
                ended.append(round(loop.time()) == seconds)
            assert ended == [True, True] and slots.waiting == 0

    in_virtual_time(work())


async def test_a_drain_refuses_those_who_wait() -> None:
    crowd = Crowd(limits(max_concurrent=1))
    await crowd.send("a", 3)
    thread = threading.Thread(target=crowd.slots.close)
    thread.start()
    await asyncio.to_thread(thread.join)
    refused = await asyncio.gather(*crowd.tasks[1:], return_exceptions=True)
    assert [type(one) for one in refused] == [ShuttingDownError] * 2 and crowd.slots.running == 1
    await crowd.end("a")
    await crowd.close()


async def test_random_use_leaves_nothing_behind() -> None:
    chance = random.Random(1)
    for _ in range(20):
        tenants = {name: TenantLimits(max_concurrent=chance.choice([None, 2])) for name in "ab"}
        crowd = Crowd(limits(tenants, max_concurrent=4, queue_timeout=chance.choice([0, LONG])))
        for _ in range(60):
            if crowd.running and chance.random() < 0.5:
                await crowd.end(chance.choice(crowd.running)[0])
            elif crowd.tasks and chance.random() < 0.2:
                chance.choice(crowd.tasks).cancel()
            else:
                await crowd.send(chance.choice("abc"), deadline_s=chance.choice([None, LONG]))
            assert crowd.slots.running <= 4
        await crowd.close()
