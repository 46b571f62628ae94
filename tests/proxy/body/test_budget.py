from __future__ import annotations

import asyncio
import threading

import pytest

from agentspec.errors import OverloadedError
from agentspec.proxy.body.budget import INLINE_BYTES, BodyBudget


def test_one_tenant_may_hold_half_and_all_the_whole() -> None:
    budget = BodyBudget(100, 2)
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
    alone = BodyBudget(100, 2, shared=False)
    with alone.account("a") as a:
        a(100)
        with pytest.raises(OverloadedError):
            a(1)


@pytest.mark.anyio
async def test_large_bodies_are_read_off_the_loop() -> None:
    budget, loop = BodyBudget(100, 2), threading.get_ident()
    assert await budget.run("a", INLINE_BYTES, threading.get_ident) == loop
    assert await budget.run("a", INLINE_BYTES + 1, threading.get_ident) != loop
    with pytest.raises(ZeroDivisionError):
        await budget.run("a", INLINE_BYTES + 1, lambda: 1 / 0)


@pytest.mark.anyio
async def test_one_tenant_never_takes_all_threads() -> None:
    budget, held = BodyBudget(100, 2), threading.Event()
    slow = [asyncio.create_task(budget.run("a", 1 << 20, held.wait, 60)) for _ in range(20)]
    await asyncio.sleep(0)
    assert await budget.run("b", 1 << 20, lambda: "read") == "read"
    assert not any(task.done() for task in slow)
    for task in slow[1:]:
        task.cancel()
    held.set()
    assert await slow[0] is True
    assert await budget.run("a", 1 << 20, lambda: "read") == "read"
