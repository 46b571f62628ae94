from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Iterator
from contextvars import copy_context
from functools import partial
from typing import Any

import httpx
import httpx2
import pytest
from langchain_core.tools import tool

from agentspec.step import (
    async_httpx_hooks,
    current_labels,
    current_policy,
    headers,
    httpx_hooks,
    report,
    step,
    workflow,
)
from agentspec.step.report import StepRow, observe
from agentspec.types import Labels, Speculation, Usage

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def fresh_report() -> Iterator[None]:
    report().reset()
    yield
    report().reset()


def row(step: str | None, workflow: str | None = None) -> StepRow:
    return next(row for row in report() if (row.workflow, row.step) == (workflow, step))


def test_labels_nest_and_end() -> None:
    @step("inner", session="s2")
    def inner() -> Labels:
        return current_labels()

    @step("outer", workflow="w", session="s1", speculation=False)
    def outer() -> tuple[Labels, Labels, bool | None]:
        return current_labels(), inner(), current_policy().speculation

    assert outer() == (Labels("s1", "w", "outer"), Labels("s2", "w", "inner"), False)
    assert current_labels() == Labels() and current_policy().speculation is None
    with workflow("v", session="s"):
        assert inner() == Labels("s2", "v", "inner")


def test_a_failing_step_is_counted_and_its_labels_end() -> None:
    @step("fails")
    def fails() -> None:
        observe(Usage(5, 2), None, 0.5, failed=True)
        raise KeyError("no")

    for _ in range(2):
        with pytest.raises(KeyError):
            fails()
    assert current_labels() == Labels()
    assert (row("fails").runs, row("fails").errors, row("fails").failed_calls) == (2, 2, 2)


def test_totals() -> None:
    @step("plan", workflow="w")
    def plan() -> None:
        observe(Usage(10, 8), Speculation(drafted=12, accepted=6, steps=2, estimated_seconds_saved=0.25), 0.5)
        observe(Usage(1, 2), None, 0.5)

    plan()
    got = row("plan", "w")
    assert (got.calls, got.prompt_tokens, got.completion_tokens) == (2, 11, 10)
    assert (got.drafted, got.accepted, got.verify_steps) == (12, 6, 2)
    assert got.tokens_per_step == 4 and got.tokens_per_second == 10 and got.estimated_seconds_saved == 0.25
    assert got.seconds > 0 and got.model_seconds == 1.0


def test_calls_outside_any_step_have_a_row() -> None:
    observe(Usage(1, 1), None, 0.1)
    assert row(None).calls == 1
    text = str(report())
    assert "(no step)" in text and "tokens/forward" in text and "no model call" not in text
    report().reset()
    assert report().rows == ()


def test_a_report_without_calls_says_how_they_are_counted() -> None:
    step("plan")(lambda: None)()
    assert row("plan").runs == 1 and "no model call was counted" in str(report())


async def test_coroutines_and_concurrent_tasks() -> None:
    @step("task")
    async def task(session: str) -> Labels:
        await asyncio.sleep(0.01)
        return await asyncio.create_task(labels_of_task(session))

    async def labels_of_task(session: str) -> Labels:
        with workflow("w", session=session):
            await asyncio.sleep(0)
            return current_labels()

    assert inspect.iscoroutinefunction(task)
    assert await asyncio.gather(task("a"), task("b")) == [Labels("a", "w", "task"), Labels("b", "w", "task")]
    assert row("task").runs == 2 and row("task").seconds >= 0.02


def test_threads_started_in_a_copied_context() -> None:
    seen: list[Labels] = []

    @step("threaded")
    def threaded() -> None:
        for run in (copy_context().run, lambda function: function()):
            thread = threading.Thread(target=run, args=(lambda: seen.append(current_labels()),))
            thread.start()
            thread.join()

    threaded()
    assert seen == [Labels(step="threaded"), Labels()]


def test_generators_keep_their_protocol_and_leave_no_labels_between_items() -> None:
    @step("generate")
    def generate(start: int) -> Any:
        got: list[Any] = [current_labels().step]
        try:
            got.append((yield start))
            got.append(current_labels().step)
            yield start + 1
        except LookupError:
            yield "caught"
        return got

    running = generate(1)
    assert inspect.isgeneratorfunction(generate)
    assert next(running) == 1 and current_labels() == Labels()
    assert running.send("sent") == 2
    assert running.throw(LookupError()) == "caught"
    with pytest.raises(StopIteration) as stop:
        next(running)
    assert stop.value.value == ["generate", "sent", "generate"]
    assert (row("generate").runs, row("generate").errors) == (1, 0)


def test_closing_a_generator_closes_its_body() -> None:
    closed: list[str | None] = []

    @step("closes")
    def closes() -> Iterator[int]:
        try:
            yield 1
        finally:
            closed.append(current_labels().step)

    running: Any = closes()
    next(running)
    running.close()
    assert closed == ["closes"] and row("closes").errors == 0


async def test_async_generators() -> None:
    closed: list[str | None] = []

    @step("stream")
    async def stream(fail: bool) -> AsyncIterator[str | None]:
        try:
            yield current_labels().step
            if fail:
                raise KeyError("no")
            yield current_labels().step
        finally:
            closed.append(current_labels().step)

    assert inspect.isasyncgenfunction(stream)
    items = []
    async for item in stream(False):
        items.append(item)
        assert current_labels() == Labels()
    with pytest.raises(KeyError):
        [item async for item in stream(True)]
    early: Any = stream(False)
    await anext(early)
    await early.aclose()
    assert items == ["stream"] * 2 and closed == ["stream"] * 3
    assert (row("stream").runs, row("stream").errors) == (3, 1)


def test_the_signature_is_kept() -> None:
    def node(state: dict[str, int], config: str, *, runtime: int = 0) -> int:
        """Its contract."""
        return state["x"]

    wrapped = step("node")(node)
    assert inspect.signature(wrapped) == inspect.signature(node)
    assert wrapped.__doc__ == "Its contract." and wrapped({"x": 3}, "c") == 3


@pytest.mark.parametrize("name", ["", None, test_totals])
def test_a_step_needs_a_name(name: Any) -> None:
    with pytest.raises(TypeError, match="@step"):
        step(name)


def test_headers_carry_labels_in_ascii() -> None:
    with workflow("größe 100%\n", session="s-1", speculation=False):
        sent = headers()
    assert sent == {
        "x-agentspec-session": "s-1",
        "x-agentspec-workflow": "gr%C3%B6%C3%9Fe 100%25%0A",
        "x-agentspec-speculation": "off",
    }
    assert headers() == {} and step("a/b c")(headers)() == {"x-agentspec-step": "a/b c"}


# Hooks in real clients of both libraries ----------------------------------------------------------------------------


@pytest.mark.parametrize("library", [httpx, httpx2], ids=["httpx", "httpx2"])
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_hooks_send_the_labels_and_change_nothing_else(library: Any, asynchronous: bool) -> None:
    seen: list[Any] = []
    transport = library.MockTransport(lambda request: seen.append(request) or library.Response(200, json={"a": 1}))
    own = {"x-agentspec-step": "mine"}
    with workflow("w", session="s"):
        if asynchronous:
            async with library.AsyncClient(transport=transport, event_hooks=async_httpx_hooks()) as client:
                answer = await client.post("http://gateway/v1/chat/completions", json={}, headers=own)
        else:
            with library.Client(transport=transport, event_hooks=httpx_hooks()) as client:
                answer = client.post("http://gateway/v1/chat/completions", json={}, headers=own)
    assert answer.json() == {"a": 1}
    assert [seen[0].headers[f"x-agentspec-{name}"] for name in ("session", "workflow", "step")] == ["s", "w", "mine"]


# Callable objects, and tools -----------------------------------------------------------------------------------------


async def test_callable_objects_of_every_kind() -> None:
    class Plain:
        def __call__(self) -> Labels:
            return current_labels()

    class Asynchronous:
        async def __call__(self) -> Labels:
            await asyncio.sleep(0)
            return current_labels()

    class Streaming:
        async def __call__(self) -> AsyncIterator[Labels]:
            await asyncio.sleep(0)
            yield current_labels()

    class Generating:
        def __call__(self) -> Iterator[Labels]:
            yield current_labels()

    assert step("a")(Plain())() == Labels(step="a")
    stepped = step("b")(Asynchronous())
    assert inspect.iscoroutinefunction(stepped) and stepped.__name__ == "Asynchronous"
    assert await stepped() == Labels(step="b")
    assert await anext(step("c")(Streaming())()) == Labels(step="c")
    assert list(step("d")(Generating())()) == [Labels(step="d")]
    assert all(row(name).runs == 1 for name in "abd")


async def test_a_function_that_returns_a_coroutine() -> None:
    async def work(number: int) -> tuple[int, Labels]:
        await asyncio.sleep(0)
        return number, current_labels()

    assert await step("partial")(partial(work, 3))() == (3, Labels(step="partial"))
    assert await step("late")(lambda: work(4))() == (4, Labels(step="late"))
    assert current_labels() == Labels() and row("late").runs == 1


def test_a_step_stands_below_a_tool() -> None:
    def look(city: str) -> str:
        """Look a city up."""
        return f"{city} {current_labels().step}"

    assert tool(step("look")(look)).invoke({"city": "Rome"}) == "Rome look"
    with pytest.raises(TypeError, match="it stands below @tool"):
        step("look")(tool(look))


def test_a_step_stands_below_static_and_class_methods() -> None:
    class Agent:
        @classmethod
        @step("class")
        def find(cls, city: str) -> str:
            return f"{cls.__name__} {city} {current_labels().step}"

    assert Agent.find("Rome") == Agent().find("Rome") == "Agent Rome class"
    with pytest.raises(TypeError, match="below @tool, @staticmethod and @classmethod"):
        step("static")(staticmethod(len))


def test_what_cannot_be_called_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="decorates functions"):
        step("plan")(3)
