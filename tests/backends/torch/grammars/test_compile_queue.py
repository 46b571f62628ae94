"""Tenants take turns with large grammars; one form is compiled once, however many ask for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from agentspec.backends.torch.grammars import compile_queue
from agentspec.backends.torch.grammars.compile_queue import CompileQueue
from agentspec.errors import InvalidRequestError, OverloadedError, ShuttingDownError

pytestmark = pytest.mark.anyio


class Compiler:
    """Notes what is compiled, once `begin` is set."""

    def __init__(self) -> None:
        self.begin = threading.Event()
        self.order: list[str] = []

    def of(self, form: str) -> Callable[[], str]:
        def compile() -> str:
            self.begin.wait(60)
            self.order.append(form)
            return form

        return compile


async def queued(queue: CompileQueue[str], compiler: Compiler, asked: str) -> list[asyncio.Task[str]]:
    """Tasks for "a1 a2 b1": tenant a asks for form 1, and so on."""
    tasks = [asyncio.create_task(queue.result(form[0], form, compiler.of(form))) for form in asked.split()]
    await asyncio.sleep(0)
    return tasks


async def test_a_tenant_with_many_forms_lets_others_through() -> None:
    queue, compiler = CompileQueue[str](), Compiler()
    tasks = await queued(queue, compiler, "a0 a1 a2 a3 a4 a5 b0 c0 b1")
    compiler.begin.set()
    assert await asyncio.gather(*tasks) == "a0 a1 a2 a3 a4 a5 b0 c0 b1".split()
    place = compiler.order.index
    assert max(place("b0"), place("c0")) <= 4 and place("b1") <= 6
    queue.close()


async def test_the_forms_of_a_tenant_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_queue, "MOST_FORMS", 2)
    queue, compiler = CompileQueue[str](), Compiler()
    tasks = await queued(queue, compiler, "a0 a1 a1 a1 b0")
    with pytest.raises(OverloadedError, match="wait to be compiled") as caught:
        await queue.result("a", "a2", compiler.of("a2"))
    assert caught.value.status == 429 and caught.value.retry_after
    compiler.begin.set()
    assert await asyncio.gather(*tasks) == "a0 a1 a1 a1 b0".split()
    assert sorted(compiler.order) == ["a0", "a1", "b0"]
    assert await queue.result("a", "a2", compiler.of("a2")) == "a2"
    queue.close()


async def test_who_leaves_takes_the_turn_along_only_if_nobody_shares_it() -> None:
    queue, compiler = CompileQueue[str](), Compiler()
    first, shared, left, alone = await queued(queue, compiler, "a0 a1 a1 a2")
    left.cancel()
    alone.cancel()
    with suppress(asyncio.CancelledError):
        await alone
    compiler.begin.set()
    assert await asyncio.gather(first, shared) == ["a0", "a1"]
    assert await queue.result("a", "a3", compiler.of("a3")) == "a3"
    assert compiler.order == ["a0", "a1", "a3"]
    queue.close()


async def test_a_refusal_reaches_all_who_asked_and_closing_ends_the_wait() -> None:
    queue, compiler = CompileQueue[str](), Compiler()

    def refuse() -> str:
        compiler.begin.wait(60)
        raise InvalidRequestError("no")

    asking = [asyncio.create_task(queue.result("a", "x", refuse)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting = await queued(queue, compiler, "a0 b0")
    queue.close()
    compiler.begin.set()
    said = await asyncio.gather(*asking, *waiting, return_exceptions=True)
    assert [type(one) for one in said] == [InvalidRequestError] * 3 + [ShuttingDownError] * 2
