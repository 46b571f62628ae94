from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from agentspec.errors import OverloadedError, ShuttingDownError
from agentspec.proxy.admission.concurrency import ConcurrencyLimiter
from agentspec.proxy.body.budget import BodyBudget
from agentspec.settings.api_keys import ApiKey
from agentspec.settings.server import ServerSettings, TenantLimits

pytestmark = pytest.mark.anyio
LONG = 10_000.0


async def silent() -> Message:
    """A client that sends nothing more and stays."""
    return await asyncio.get_running_loop().create_future()


def limits(tenants: dict[str, TenantLimits] | None = None, **server: Any) -> ServerSettings:
    tenants = tenants or {}
    keys = tuple(ApiKey(tenant=name, key_env="X") for name in tenants)
    return ServerSettings(api_keys=keys, tenants=tenants, **{"queue_timeout": LONG, **server})


class Crowd:
    """Requests that run until they are told to end, on a clock that stands still."""

    def __init__(self, settings: ServerSettings) -> None:
        self.limiter = ConcurrencyLimiter(settings)
        loop = asyncio.get_running_loop()
        self.time, begun = 0.0, loop.time()
        loop.time = lambda: begun + self.time  # type: ignore[method-assign]
        self.entered: list[str] = []
        self.running: list[tuple[str, asyncio.Event]] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def send(self, tenant: str, count: int = 1, receive: Receive = silent) -> None:
        for _ in range(count):
            self.tasks.append(asyncio.create_task(self._request(tenant, receive)))
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

    async def _request(self, tenant: str, receive: Receive) -> None:
        async with self.limiter.enter(tenant, receive):
            end = asyncio.Event()
            self.entered.append(tenant)
            self.running.append((tenant, end))
            await end.wait()


async def settle() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


async def test_what_finds_no_place_and_may_not_wait_is_refused() -> None:
    limiter = ConcurrencyLimiter(limits(max_concurrent=2, queue_timeout=0))
    async with limiter.enter("a", silent) as receive, limiter.enter("b", silent):
        assert receive is silent and limiter.running == 2
        with pytest.raises(OverloadedError, match="max_concurrent"):
            async with limiter.enter("a", silent):
                pass
        limiter.close()
        with pytest.raises(ShuttingDownError):
            async with limiter.enter("a", silent):
                pass
    assert limiter.running == 0
    assert [(one.tenant, one.running, one.refused) for one in limiter.samples()] == [("a", 0, 1), ("b", 0, 0)]


async def test_places_are_given_on_in_order_of_arrival() -> None:
    crowd = Crowd(limits(max_concurrent=1))
    order: list[int] = []

    async def numbered(number: int) -> None:
        async with crowd.limiter.enter("a", silent):
            order.append(number)

    await crowd.send("a")
    waiting = [asyncio.create_task(numbered(number)) for number in range(5)]
    await settle()
    assert crowd.limiter.waiting == 5 and order == []
    await crowd.end("a")
    await asyncio.gather(*waiting)
    assert order == [0, 1, 2, 3, 4] and crowd.limiter.running == crowd.limiter.waiting == 0


@pytest.mark.parametrize("places", [1, 2, 16])
@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.5), (3.0, 0.75)])
async def test_busy_tenants_share_by_weight(places: int, weight: float, share: float) -> None:
    crowd = Crowd(limits({"a": TenantLimits(weight=weight), "b": TenantLimits()}, max_concurrent=places))
    await crowd.send("a", 100)  # first, and most
    await crowd.send("b", 60)
    for _ in range(80):
        crowd.time += 1
        await crowd.end(crowd.running[0][0])
    served = Counter(crowd.entered[places : places + 80])
    assert abs(served["a"] / 80 - share) < 0.05
    await crowd.close()


async def test_a_tenant_with_longer_requests_gets_no_more_time() -> None:
    """Requests of a take four times as long, so a quarter as many are admitted."""
    crowd = Crowd(limits(max_concurrent=4, max_queued=1000))
    ends: list[tuple[float, str]] = []
    await crowd.send("a", 200)
    await crowd.send("b", 600)
    spent: Counter[str] = Counter()
    seen = 0
    for _ in range(400):
        for tenant in crowd.entered[seen:]:
            ends.append((crowd.time + (4.0 if tenant == "a" else 1.0), tenant))
        seen = len(crowd.entered)
        ends.sort()
        crowd.time, tenant = ends.pop(0)
        if len(crowd.entered) > 40:
            spent[tenant] += 4 if tenant == "a" else 1
        await crowd.end(tenant)
    assert 0.8 < spent["a"] / spent["b"] < 1.25
    await crowd.close()


async def test_time_alone_earns_neither_credit_nor_debt() -> None:
    crowd = Crowd(limits(max_concurrent=2))
    for _ in range(50):  # b is alone for long
        await crowd.send("b")
        crowd.time += 1
        await crowd.end("b")
    await crowd.send("b", 12)
    await crowd.send("a", 12)
    for _ in range(10):
        crowd.time += 1
        await crowd.end(crowd.running[0][0])
    assert abs(Counter(crowd.entered[52:])["a"] - 5) <= 1
    await crowd.close()


async def test_reserved_places_are_kept_and_the_rest_is_lent() -> None:
    tenants = {"a": TenantLimits(reserved=2), "b": TenantLimits(), "c": TenantLimits()}
    crowd = Crowd(limits(tenants, max_concurrent=5))
    await crowd.send("b", 9)
    assert crowd.counts() == {"b": 3}  # two are a's
    await crowd.send("a", 2)
    assert crowd.counts() == {"a": 2, "b": 3}  # at once, past b's queue
    await crowd.end("b")
    assert crowd.counts() == {"a": 2, "b": 3}
    await crowd.end("a")
    assert crowd.counts() == {"a": 1, "b": 3}  # reserved again
    await crowd.close()


async def test_a_refusal_names_the_limit_that_was_reached() -> None:
    settings = limits({"a": TenantLimits(max_concurrent=1)}, max_concurrent=4, queue_timeout=0)
    limiter = ConcurrencyLimiter(settings)
    async with limiter.enter("a", silent):
        with pytest.raises(OverloadedError, match="the tenant's max_concurrent"):
            async with limiter.enter("a", silent):
                pass


async def test_a_tenants_own_limit() -> None:
    crowd = Crowd(limits({"a": TenantLimits(max_concurrent=2), "b": TenantLimits()}, max_concurrent=4))
    await crowd.send("a", 5)
    await crowd.send("b", 5)
    assert crowd.counts() == {"a": 2, "b": 2}
    await crowd.end("b")
    assert crowd.counts() == {"a": 2, "b": 2}
    await crowd.end("a")
    assert crowd.counts() == {"a": 2, "b": 2}
    await crowd.close()


async def test_new_limits_hold_at_once() -> None:
    crowd = Crowd(limits({"a": TenantLimits(), "b": TenantLimits()}, max_concurrent=2))
    await crowd.send("a", 6)
    crowd.limiter.update(limits({"a": TenantLimits(), "b": TenantLimits(reserved=1)}, max_concurrent=5))
    await settle()
    assert crowd.counts() == {"a": 4}
    await crowd.send("b")
    assert crowd.counts() == {"a": 4, "b": 1}
    crowd.limiter.update(limits({"a": TenantLimits(), "b": TenantLimits()}, max_concurrent=1))
    for _ in range(4):
        await crowd.end("a")
    assert crowd.counts() == {"b": 1} and crowd.limiter.waiting == 2
    await crowd.end("b")
    assert crowd.counts() == {"a": 1}
    await crowd.close()


async def test_the_queue_is_bounded_and_time_runs_out() -> None:
    limiter = ConcurrencyLimiter(limits(max_concurrent=1, max_queued=1, queue_timeout=0.5))
    async with limiter.enter("a", silent):
        waiting = asyncio.create_task(limiter.enter("a", silent).__aenter__())
        await settle()
        with pytest.raises(OverloadedError, match="max_queued"):
            async with limiter.enter("a", silent):
                pass
        with pytest.raises(OverloadedError, match="queue_timeout"):
            await waiting
        assert limiter.waiting == 0
    assert limiter.running == 0


async def test_a_request_that_would_wait_too_long_is_refused_at_once() -> None:
    crowd = Crowd(limits(max_concurrent=2, queue_timeout=5))
    await crowd.send("a")
    crowd.time += 4.0  # so long do requests take
    await crowd.end("a")
    await crowd.send("a", 2 + 2)  # the third waits two seconds for one of two places, the fourth four
    assert crowd.limiter.waiting == 2
    with pytest.raises(OverloadedError, match="queue_timeout") as caught:
        async with crowd.limiter.enter("a", silent):
            pass
    assert caught.value.retry_after == 6.0
    await crowd.send("b", 2)  # another tenant is not held to that
    assert crowd.limiter.waiting == 4
    await crowd.close()


@pytest.mark.parametrize(
    ("tenant", "other", "waiting", "wait"), [("light", "heavy", 2, 6.0), ("heavy", "light", 7, 16 / 3)]
)
async def test_how_long_one_would_wait_goes_by_the_weights(tenant: str, other: str, waiting: int, wait: float) -> None:
    """Of eight places two are the light tenant's share and six the heavy one's."""
    weights = {"light": TenantLimits(weight=1), "heavy": TenantLimits(weight=3)}
    crowd = Crowd(limits(weights, max_concurrent=8, queue_timeout=5))
    await crowd.send(tenant)
    crowd.time += 4.0  # so long do requests take
    await crowd.end(tenant)
    await crowd.send(other, 8)
    await crowd.send(tenant, waiting + 1)
    assert crowd.limiter.waiting == waiting
    refused = crowd.tasks[-1].exception()
    assert isinstance(refused, OverloadedError) and refused.retry_after == pytest.approx(wait)
    await crowd.close()


async def test_a_client_that_leaves_the_queue_takes_no_place() -> None:
    crowd = Crowd(limits(max_concurrent=1))
    messages: asyncio.Queue[Message] = asyncio.Queue()
    await crowd.send("a")
    await crowd.send("a", receive=messages.get)
    messages.put_nowait({"type": "http.request", "body": b"x", "more_body": True})
    await settle()
    assert crowd.limiter.waiting == 1
    messages.put_nowait({"type": "http.disconnect"})
    await settle()
    assert crowd.limiter.waiting == 0
    with pytest.raises(ClientDisconnect):
        await crowd.tasks[1]
    await crowd.end("a")
    assert crowd.limiter.running == 0


async def test_a_cancelled_request_gives_back_the_place_that_it_just_got() -> None:
    crowd = Crowd(limits(max_concurrent=1))
    await crowd.send("a", 3)
    crowd.running[0][1].set()  # the first ends and the second is given its place,
    await asyncio.sleep(0)
    crowd.tasks[1].cancel()  # but is cancelled before it runs on
    await settle()
    assert crowd.entered == ["a", "a"] and crowd.limiter.running == 1 and crowd.limiter.waiting == 0
    await crowd.close()
    assert crowd.limiter.running == 0


@pytest.mark.parametrize("size", [10, 1 << 20])
async def test_what_came_while_waiting_is_read_first(size: int) -> None:
    """All of it, and no more than enough is taken from the server while nobody reads."""
    limiter = ConcurrencyLimiter(limits(max_concurrent=1))
    taken = 0
    pieces = [b"%d" % (number % 10) * (size // 10) for number in range(10)]

    async def receive() -> Message:
        nonlocal taken
        if taken == len(pieces):
            return await silent()
        taken += 1
        return {"type": "http.request", "body": pieces[taken - 1], "more_body": taken < len(pieces)}

    holding = limiter.enter("a", silent)
    await holding.__aenter__()
    waiting = asyncio.create_task(limiter.enter("a", receive).__aenter__())
    await settle()
    await settle()
    assert taken == (10 if size == 10 else 1)
    await holding.__aexit__(None, None, None)
    replayed = await waiting
    assert b"".join([(await replayed())["body"] for _ in pieces]) == b"".join(pieces)


async def test_what_comes_while_a_request_waits_is_accounted_for() -> None:
    limiter, budget = ConcurrencyLimiter(limits(max_concurrent=1)), BodyBudget(100, 2, shared=False)
    pieces = [b"x" * 30, b"y" * 30]

    async def receive() -> Message:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": True} if pieces else await silent()

    holding = limiter.enter("a", silent)
    await holding.__aenter__()
    with budget.account("a") as account, budget.account("a") as another:
        waiting = asyncio.create_task(limiter.enter("a", account.counting(receive)).__aenter__())
        await settle()
        assert budget.held == 60
        pieces.append(b"z" * 50)
        with pytest.raises(OverloadedError, match="max_body_memory"):
            await limiter.enter("a", another.counting(receive)).__aenter__()
        assert budget.held == 60 and limiter.waiting == 1
        await holding.__aexit__(None, None, None)
        replayed = await waiting
        assert [(await replayed())["body"] for _ in range(2)] == [b"x" * 30, b"y" * 30] and budget.held == 60
    assert budget.held == 0


async def test_a_piece_that_is_refused_at_the_moment_of_the_turn_is_not_lost() -> None:
    limiter, budget = ConcurrencyLimiter(limits(max_concurrent=1)), BodyBudget(10, 2, shared=False)
    go = asyncio.Event()

    async def receive() -> Message:
        await go.wait()
        return {"type": "http.request", "body": b"x" * 30, "more_body": False}

    holding = limiter.enter("a", silent)
    await holding.__aenter__()
    with budget.account("a") as account:
        waiting = asyncio.create_task(limiter.enter("a", account.counting(receive)).__aenter__())
        await settle()
        go.set()
        await holding.__aexit__(None, None, None)
        replayed = await waiting
        with pytest.raises(OverloadedError, match="max_body_memory"):
            await replayed()


@pytest.mark.parametrize("from_a_thread", [False, True])
async def test_a_drain_refuses_those_who_wait(from_a_thread: bool) -> None:
    crowd = Crowd(limits(max_concurrent=1))
    await crowd.send("a", 3)
    if from_a_thread:
        thread = threading.Thread(target=crowd.limiter.close)
        thread.start()
        thread.join()
    else:
        crowd.limiter.close()
    await settle()
    for task in crowd.tasks[1:]:
        with pytest.raises(ShuttingDownError):
            await task
    assert crowd.limiter.running == 1 and crowd.limiter.waiting == 0
    await crowd.end("a")
    assert crowd.limiter.running == 0


async def test_random_use_leaves_nothing_behind() -> None:
    """The counts hold at every moment, whoever ends, leaves or comes."""
    for seed in range(20):
        dice = random.Random(seed)
        tenants = {
            "a": TenantLimits(reserved=2, weight=2),
            "b": TenantLimits(max_concurrent=3),
            "c": TenantLimits(reserved=1, max_concurrent=2),
        }
        crowd = Crowd(limits(tenants, max_concurrent=6, max_queued=5))
        for _ in range(150):
            action = dice.random()
            if action < 0.5:
                await crowd.send(dice.choice("abcd"))
            elif action < 0.8 and crowd.running:
                await crowd.end(dice.choice(crowd.running)[0])
            elif crowd.tasks:
                dice.choice(crowd.tasks).cancel()
                await settle()
            crowd.running = [one for one in crowd.running if not one[1].is_set()]
            counts = {one.tenant: one.running for one in crowd.limiter.samples()}
            assert crowd.limiter.running == sum(counts.values()) <= 6
            assert counts.get("b", 0) <= 3 and counts.get("c", 0) <= 2
            others = crowd.limiter.running - counts.get("a", 0)
            assert others <= 6 - 2
        await crowd.close()
        assert crowd.limiter.running == crowd.limiter.waiting == 0
        with suppress(OverloadedError):
            async with crowd.limiter.enter("a", silent):
                assert crowd.limiter.running == 1
