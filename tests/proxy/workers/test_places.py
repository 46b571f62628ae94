"""Places that a parent gives to workers: messages, turns, and what a worker that is gone leaves behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from agentspec.errors import OverloadedError, ShuttingDownError
from agentspec.proxy.admission.concurrency import ConcurrencyLimiter
from agentspec.proxy.admission.turns import ProgramCall
from agentspec.proxy.workers.places import SharedLimiter, WorkerPlaces
from agentspec.settings.api_keys import ApiKey
from agentspec.settings.server import ServerSettings, TenantLimits


class Parent:
    """A limiter and its workers, whose messages arrive in the next turn of the loop."""

    def __init__(self, workers: int = 2, **limits: Any) -> None:
        self.limiter = ConcurrencyLimiter(ServerSettings(**limits))
        self.messages: list[tuple[Any, ...]] = []
        self.workers = [SharedLimiter() for _ in range(workers)]
        self.places = [WorkerPlaces(self.limiter, self._to(worker.answered)) for worker in self.workers]
        for worker, places in zip(self.workers, self.places, strict=True):
            worker.send = self._from(places)

    def _to(self, receive: Callable[..., None]) -> Callable[..., None]:
        def send(*message: Any) -> None:
            self.messages.append(message)
            asyncio.get_running_loop().call_soon(receive, *message)

        return send

    def _from(self, places: WorkerPlaces) -> Callable[..., None]:
        def send(name: str, *told: Any) -> None:
            self.messages.append((name, *told))
            asyncio.get_running_loop().call_soon(getattr(places, name), *told)

        return send


async def silent() -> Any:
    await asyncio.Event().wait()


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 60))


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def hold(worker: SharedLimiter, over: asyncio.Event, tenant: str = "a", receive: Any = silent) -> None:
    async with worker.enter(tenant, receive):
        await over.wait()


def test_a_request_costs_three_messages() -> None:
    async def main() -> None:
        parent = Parent(max_concurrent=2)
        for worker in parent.workers:
            async with worker.enter("a", silent):
                assert parent.limiter.running == 1 == worker.running
        await turns()
        assert [name for name, *_ in parent.messages] == ["take", "go", "leave"] * 2
        assert parent.limiter.running == 0

    run(main())


def test_limits_are_those_of_all_workers() -> None:
    async def main() -> None:
        parent = Parent(max_concurrent=3, queue_timeout=60)
        over = [asyncio.Event() for _ in range(8)]
        tasks = [asyncio.create_task(hold(parent.workers[n % 2], over[n])) for n in range(8)]
        await turns()
        assert parent.limiter.running == 3 == sum(worker.running for worker in parent.workers)
        for number in range(8):
            over[number].set()
            await turns()
            assert parent.limiter.running == min(3, 7 - number)
        await asyncio.gather(*tasks)

    run(main())


def test_what_workers_see_of_kv_caches_reaches_the_parent_before_it_gives_a_place() -> None:
    async def main() -> None:
        parent = Parent(max_concurrent=1, queue_timeout=60, order="workflow")
        full = [False, False]
        for number, worker in enumerate(parent.workers):
            worker.pressed = lambda number=number: full[number]  # type: ignore[misc]
        seen: list[bool] = []

        def pressed() -> bool:
            seen.append(any(one.pressed for one in parent.places))
            return seen[-1]

        parent.limiter.pressed = pressed
        over = [asyncio.Event() for _ in range(3)]
        tasks = [asyncio.create_task(hold(parent.workers[number % 2], one)) for number, one in enumerate(over)]
        await turns()
        full[0] = True
        over[0].set()
        await turns()
        full[0] = False
        over[1].set()
        await turns()
        over[2].set()
        await asyncio.gather(*tasks)
        await turns()
        assert seen == [True, True]  # a worker tells with its own requests
        assert parent.messages.count(("press", True)) == 1 == parent.messages.count(("press", False))
        parent.places[0].press(True)
        parent.places[0].leave_all()
        assert not parent.places[0].pressed

    run(main())


def test_a_worker_that_is_gone_gives_everything_back() -> None:
    async def main() -> None:
        parent = Parent(max_concurrent=2, queue_timeout=60)
        over = asyncio.Event()
        gone = [asyncio.create_task(hold(parent.workers[0], over)) for _ in range(4)]  # two of them wait
        await turns()
        kept = asyncio.create_task(hold(parent.workers[1], over))
        await turns()
        assert parent.workers[1].running == 0 and parent.limiter.waiting == 3
        parent.places[0].leave_all()
        await turns()
        assert parent.workers[1].running == 1 == parent.limiter.running and not parent.limiter.waiting
        for task in gone:
            task.cancel()
        await turns()
        over.set()
        await kept
        await turns()
        assert parent.limiter.running == 0

    run(main())


def test_refusals_come_from_the_parent() -> None:
    async def main() -> None:
        parent = Parent(max_concurrent=1, queue_timeout=0.5, max_queued=1)
        over = asyncio.Event()
        first = asyncio.create_task(hold(parent.workers[0], over))
        await turns()
        waiting = asyncio.create_task(hold(parent.workers[1], over))
        await turns()
        with pytest.raises(OverloadedError, match="max_queued"):
            await hold(parent.workers[0], over)
        with pytest.raises(OverloadedError, match="queue_timeout") as refused:
            await waiting
        assert refused.value.retry_after >= 1
        assert [(one.running, one.waiting, one.refused) for one in parent.limiter.samples()] == [(1, 0, 2)]
        assert not parent.workers[0].samples()
        over.set()
        await first

    run(main())


def test_a_request_that_is_refused_its_memory_while_it_waits_leaves_the_line() -> None:
    async def no_room() -> Any:
        raise OverloadedError("too many large requests")

    async def main() -> None:
        parent = Parent(max_concurrent=1, queue_timeout=60)
        over = asyncio.Event()
        first = asyncio.create_task(hold(parent.workers[0], over))
        await turns()
        with pytest.raises(OverloadedError, match="large requests"):
            await hold(parent.workers[1], over, receive=no_room)
        await turns()
        assert not parent.limiter.waiting
        over.set()
        await first
        await turns()
        assert parent.limiter.running == 0

    run(main())


def test_a_client_that_leaves_leaves_the_line() -> None:
    async def main() -> None:
        parent = Parent(max_concurrent=1, queue_timeout=60)
        over = asyncio.Event()
        first = asyncio.create_task(hold(parent.workers[0], over))
        await turns()
        left = asyncio.Event()

        async def receive() -> Any:
            await left.wait()
            return {"type": "http.disconnect"}

        waiting = asyncio.create_task(hold(parent.workers[1], over, receive=receive))
        await turns()
        assert parent.limiter.waiting == 1
        left.set()
        with pytest.raises(ClientDisconnect):
            await waiting
        await turns()
        assert parent.limiter.waiting == 0 and parent.limiter.running == 1
        over.set()
        await first

    run(main())


@pytest.mark.parametrize("moment", range(6))
def test_a_cancelled_request_leaves_no_place_behind(moment: int) -> None:
    async def main() -> None:
        parent = Parent(max_concurrent=1)
        task = asyncio.create_task(hold(parent.workers[0], asyncio.Event()))
        for _ in range(moment):
            await asyncio.sleep(0)
        task.cancel()
        await turns()
        assert task.cancelled() and parent.limiter.running == 0 == parent.workers[0].running

    run(main())


@pytest.mark.parametrize("by_parent", [True, False])
def test_a_drain_refuses_what_waits(by_parent: bool) -> None:
    async def main() -> None:
        parent = Parent(max_concurrent=1, queue_timeout=60)
        over = asyncio.Event()
        first = asyncio.create_task(hold(parent.workers[0], over))
        await turns()
        waiting = asyncio.create_task(hold(parent.workers[1], over))
        await turns()
        if by_parent:
            parent.limiter.close()
        else:
            parent.workers[1].close()
        for request in (waiting, hold(parent.workers[1], over)):
            with pytest.raises(ShuttingDownError):
                await request
        await turns()
        assert parent.limiter.running == 1 and not parent.limiter.waiting
        over.set()
        await first

    run(main())


def test_weights_hold_across_workers_to_the_place(in_virtual_time: Any) -> None:
    """Both tenants always wait on both workers; requests take equally long by a clock that jumps."""
    limits = {"heavy": TenantLimits(weight=3.0)}
    keys = tuple(ApiKey(tenant=name, key_env="unused") for name in ("heavy", "light"))
    got: Counter[tuple[str, int]] = Counter()

    async def ask(parent: Parent, tenant: str, worker: int) -> None:
        async with parent.workers[worker].enter(tenant, silent):
            got[tenant, worker] += 1
            await asyncio.sleep(0.1)

    async def main() -> None:
        parent = Parent(max_concurrent=4, queue_timeout=1000, max_queued=1000, tenants=limits, api_keys=keys)
        for tenant in ("heavy", "light"):  # so that it is known how long their requests take
            await ask(parent, tenant, 0)
            await turns()
        got.clear()
        tasks = [
            asyncio.create_task(ask(parent, tenant, number % 2))
            for number in range(200)
            for tenant in ("heavy", "light")
        ]
        await asyncio.sleep(0.1 * 50 + 0.01)  # 200 places later, when both still wait
        shares = Counter[str]()
        for (tenant, _), count in got.items():
            shares[tenant] += count
        assert sum(shares.values()) == 204 and abs(shares["heavy"] - 3 * shares["light"]) <= 4, shares
        assert abs(got["heavy", 0] - got["heavy", 1]) <= 4 >= abs(got["light", 0] - got["light", 1])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await turns()
        assert parent.limiter.running == 0 == parent.limiter.waiting

    in_virtual_time(main())


def test_the_order_of_programs_holds_across_workers() -> None:
    async def main() -> None:
        parent, served = Parent(max_concurrent=1, queue_timeout=1000.0, order="workflow"), []

        async def request(worker: int, name: str, call: ProgramCall, over: asyncio.Event) -> None:
            async with parent.workers[worker].enter("a", silent, call):
                served.append(name)
                await over.wait()

        overs = [asyncio.Event() for _ in range(3)]
        waits = ("running", None), ("patient", 400.0), ("urgent", 5.0)
        tasks = []
        for number, (name, deadline) in enumerate(waits):
            call = ProgramCall(name, deadline_s=deadline)
            tasks.append(asyncio.create_task(request(number % 2, name, call, overs[number])))
            await turns()
        for over in overs:
            over.set()
            await turns()
        await asyncio.gather(*tasks)
        assert served == ["running", "urgent", "patient"]
        assert parent.limiter.running == 0 == parent.limiter.waiting

    run(main())


class Counting(ConcurrencyLimiter):
    """Counts what requests tell it."""

    def __init__(self, settings: ServerSettings) -> None:
        super().__init__(settings)
        self.told: Counter[str] = Counter()

    def note(self, *arguments: Any) -> Any:
        self.told["note"] += 1
        return super().note(*arguments)

    def forget(self, *arguments: Any) -> None:
        self.told["forget"] += 1
        super().forget(*arguments)

    def release(self, *arguments: Any) -> None:
        self.told["release"] += 1
        super().release(*arguments)


def test_a_request_is_forgotten_if_it_gets_no_place_whatever_the_reason() -> None:
    async def main() -> None:
        settings = ServerSettings(max_concurrent=1, max_queued=2, queue_timeout=0.01)
        limiter = Counting(settings)
        answers: list[tuple[Any, ...]] = []
        places = WorkerPlaces(limiter, lambda *message: answers.append(message))
        for number in (1, 2, 3, 4):  # it runs, leaves, is late, is refused
            places.take(number, "a")
        places.leave(2)
        await asyncio.sleep(0.02)
        limiter.update(settings.model_copy(update={"queue_timeout": 1000.0}))
        places.take(5, "a")  # waits when the gateway closes
        limiter.close()
        await turns()
        places.take(6, "a")
        places.leave(1)
        assert [message[:2] for message in answers] == [
            *[("go", 1), ("wait", 2), ("wait", 3), ("no", 4), ("no", 3), ("wait", 5), ("closed", 5), ("closed", 6)]
        ]
        assert limiter.told == {"note": 6, "forget": 5, "release": 1}

    run(main())
