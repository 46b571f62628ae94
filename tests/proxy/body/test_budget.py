from __future__ import annotations

import asyncio
import threading

import pytest

from agentspec.errors import AnswerMemoryError, OverloadedError
from agentspec.proxy.body import budget as budget_module
from agentspec.proxy.body.budget import INLINE_BYTES, BodyAccount, BodyBudget


def test_one_tenant_may_hold_half_and_all_the_whole() -> None:
    budget = BodyBudget(100)
    with budget.account("a") as a, budget.account("b") as b:
        a(20)
        a(30)
        with pytest.raises(OverloadedError, match="max_body_memory"):
            a(1)
        b(50)
        with budget.account("c") as c, pytest.raises(OverloadedError):
            c(1)
        assert budget.held == 100
    assert budget.held == 0
    alone = BodyBudget(100, shared=False)
    with alone.account("a") as a:
        a(100)
        with pytest.raises(OverloadedError):
            a(1)


@pytest.mark.anyio
async def test_large_bodies_are_read_off_the_loop() -> None:
    budget, loop = BodyBudget(100), threading.get_ident()
    assert await budget.run("a", INLINE_BYTES, threading.get_ident) == loop
    assert await budget.run("a", INLINE_BYTES + 1, threading.get_ident) != loop
    with pytest.raises(ZeroDivisionError):
        await budget.run("a", INLINE_BYTES + 1, lambda: 1 / 0)


@pytest.mark.anyio
async def test_one_tenant_never_takes_all_threads() -> None:
    budget, held = BodyBudget(100), threading.Event()
    slow = [asyncio.create_task(budget.run("a", 1 << 20, held.wait, 60)) for _ in range(20)]
    await asyncio.sleep(0)
    assert await budget.run("b", 1 << 20, lambda: "read") == "read"
    assert not any(task.done() for task in slow)
    for task in slow[1:]:
        task.cancel()
    held.set()
    assert await slow[0] is True
    assert await budget.run("a", 1 << 20, lambda: "read") == "read"


async def waiting_for(account: BodyAccount, size: int) -> asyncio.Task[None]:
    task = asyncio.create_task(account.wait_for(size))
    for _ in range(5):
        await asyncio.sleep(0)
    return task


@pytest.mark.anyio
async def test_an_answer_waits_until_there_is_room() -> None:
    budget = BodyBudget(200, shared=False)
    with budget.account("a") as first, budget.account("b") as second:
        first(180)
        large = await waiting_for(second, 50)
        first.hold(-20)
        await asyncio.sleep(0)
        assert not large.done()
        first.hold(-10)
        await large
        assert budget.held == 200
    assert budget.held == 0


@pytest.mark.anyio
async def test_answers_leave_half_of_the_memory_for_bodies() -> None:
    """Clients that do not read their answers must not keep others from asking."""
    budget = BodyBudget(100, shared=False)
    with budget.account("a") as first, budget.account("a") as second, budget.account("a") as third:
        await first.wait_for(50)
        waiting = await waiting_for(second, 1)
        third(50)
        assert not waiting.done() and budget.held == 100
        first.hold(-50, answer=True)
        await waiting
    assert budget.held == 0


@pytest.mark.anyio
async def test_who_waits_for_a_tenants_own_share_holds_up_nobody_else() -> None:
    budget = BodyBudget(200)
    with budget.account("a") as held, budget.account("a") as more, budget.account("b") as other:
        await held.wait_for(40)
        own = await waiting_for(more, 20)
        await (await waiting_for(other, 50))
        assert not own.done()
        with pytest.raises(AnswerMemoryError, match="larger than"):
            await held.wait_for(51)
        held.hold(-40, answer=True)
        await own
    assert budget.held == 0


@pytest.mark.anyio
async def test_a_wait_in_vain_ends_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "ANSWER_SECONDS", 0.01)
    budget = BodyBudget(100, shared=False)
    with budget.account("a") as first, budget.account("b") as second, budget.account("c") as third:
        first(95)
        with pytest.raises(AnswerMemoryError, match="max_body_memory") as caught:
            await second.wait_for(50)
        assert caught.value.status == 503
        await third.wait_for(5)  # nobody is before it any more
        cancelled = await waiting_for(third, 40)
        cancelled.cancel()
        first.hold(-95)  # its turn comes as it goes
        await asyncio.wait([cancelled])
    assert budget.held == 0
