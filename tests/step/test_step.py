"""`@step` and `workflow`: what model calls inherit, and what the report counts of calls of `ChatAgentSpec`."""

from __future__ import annotations

import asyncio
import inspect
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.tools import tool

from agentspec.errors import EngineError, InvalidRequestError
from agentspec.langchain import ChatAgentSpec
from agentspec.protocol.speculation import RetrievalSpeculation, StepSpeculation
from agentspec.runtime import Runtime
from agentspec.settings.load import Settings
from agentspec.step import (
    async_httpx_hooks,
    current_labels,
    current_policy,
    headers,
    httpx_hooks,
    keep_labels,
    report,
    step,
    workflow,
)
from agentspec.testing import Answer, FakeBackend
from agentspec.types import Labels, Speculation, Usage

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def fresh_report() -> Iterator[None]:
    report().reset()
    yield
    report().reset()


def row(step: str | None, workflow: str | None = None) -> Any:
    return next(row for row in report() if (row.workflow, row.step) == (workflow, step))


def model_of(*answers: Any) -> ChatAgentSpec:
    backend = FakeBackend(*answers)
    return ChatAgentSpec(model="m", runtime=Runtime(Settings(backends={}), backends={"m": backend}), max_retries=0)


def test_the_report_counts_model_calls() -> None:
    speculation = Speculation(drafted=12, accepted=6, steps=2, estimated_seconds_saved=0.25)
    counted = Answer("a b", usage=Usage(10, 8), speculation=speculation)
    model = model_of(counted, Answer("c", usage=Usage(1, 2)), EngineError("it broke"))

    @step("plan", workflow="w")
    def plan() -> None:
        model.invoke("x")
        model.invoke("x")

    plan()
    got = row("plan", "w")
    assert (got.calls, got.prompt_tokens, got.completion_tokens, got.runs, got.errors) == (2, 11, 10, 1, 0)
    assert (got.drafted, got.accepted, got.verify_steps, got.tokens_per_step) == (12, 6, 2, 4)
    assert got.estimated_seconds_saved == 0.25 and got.seconds > 0 and got.model_seconds > 0
    with pytest.raises(EngineError):
        step("fails")(model.invoke)("x")
    assert (row("fails").runs, row("fails").errors, row("fails").failed_calls) == (1, 1, 1)
    assert current_labels() == Labels()
    before, text = report(), str(report())
    assert "plan" in text and "tokens/forward" in text and "4.00" in text and "no model call" not in text
    report().reset()
    assert report().rows == () and len(before.rows) == 2, "a report is a snapshot"
    assert repr(before) == str(before)
    step("plan")(lambda: None)()
    assert row("plan").runs == 1 and "no model call was counted" in str(report())


def test_steps_of_thinking_and_rounds_of_retrieval_are_no_forwards() -> None:
    work = (Speculation(steps=2), StepSpeculation(steps=5), RetrievalSpeculation(steps=4))
    model = model_of(*(Answer("a", usage=Usage(1, 60), speculation=one) for one in work))
    for _ in work:
        model.invoke("x")
    (got,) = report()
    assert (got.verify_steps, got.rounds, got.tokens_per_step, got.step) == (2, 9, 30, None)
    assert "(no step)" in str(report())


def test_rows_are_bounded_and_no_count_is_lost() -> None:
    def run(thread: int) -> None:
        for number in range(400):
            step(f"step {thread} {number} \ud800")(lambda: None)()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    rows = list(report())
    assert len(rows) == 1025 and (rows[-1].workflow, rows[-1].step) == ("(other)", "(other)")
    assert sum(row.runs for row in rows) == 1600
    assert " ?" in str(report()).encode().decode(), "any name can be printed"


@given(st.lists(st.tuples(st.text(min_size=1, max_size=40), st.integers(0, 10**9)), max_size=3), st.integers(60, 250))
def test_a_report_fits_the_terminal_and_a_notebook_gets_every_column(rows: list[tuple[str, int]], width: int) -> None:
    report().reset()
    for name, tokens in rows:
        step(name, workflow="<w>")(model_of(Answer("a", usage=Usage(tokens, tokens))).invoke)("x")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        lines, table = str(report()).splitlines(), report()._repr_html_()
    assert max(map(len, lines[: len(report().rows) + 1])) <= width and "calls" in lines[0] and "tokens" in lines[0]
    assert width < 200 or ("est. s saved" in lines[0] and "rounds" in lines[0])
    assert table.count("<th>") == 18 and table.count("<td>") == 18 * len(report().rows) and "<w>" not in table


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

    closed: Any = generate(1)
    assert next(closed) == 1
    closed.close()
    assert row("generate").errors == 0
    running = generate(1)
    assert inspect.isgeneratorfunction(generate)
    assert next(running) == 1 and current_labels() == Labels()
    assert running.send("sent") == 2
    assert running.throw(LookupError()) == "caught"
    with pytest.raises(StopIteration) as stop:
        next(running)
    assert stop.value.value == ["generate", "sent", "generate"]
    assert (row("generate").runs, row("generate").errors) == (2, 0)


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


@pytest.mark.parametrize("name", ["", None, print])
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


async def test_callable_objects_partial_functions_and_functions_that_return_a_coroutine() -> None:
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

    asynchronous = Asynchronous()
    stepped = step("a")(asynchronous)
    assert inspect.iscoroutinefunction(stepped) and stepped.__name__ == "Asynchronous"
    assert await stepped() == Labels(step="a")
    assert await anext(step("b")(Streaming())()) == Labels(step="b")
    assert list(step("c")(Generating())()) == [Labels(step="c")]
    assert await step("d")(partial(Asynchronous.__call__, asynchronous))() == Labels(step="d")
    assert await step("e")(lambda: asynchronous())() == Labels(step="e")
    assert current_labels() == Labels() and all(row(name).runs == 1 for name in "acde")


def test_a_step_stands_below_tools_static_and_class_methods() -> None:
    def look(city: str) -> str:
        """Look a city up."""
        return f"{city} {current_labels().step}"

    class Agent:
        @classmethod
        @step("class")
        def find(cls, city: str) -> str:
            return f"{cls.__name__} {look(city)}"

    assert tool(step("look")(look)).invoke({"city": "Rome"}) == "Rome look"
    assert Agent.find("Rome") == Agent().find("Rome") == "Agent Rome class"
    for wrong in (tool(look), staticmethod(look)):
        with pytest.raises(TypeError, match="it stands below @tool, @staticmethod and @classmethod"):
            step("look")(wrong)


@pytest.mark.parametrize("label", ["session", "workflow"])
def test_a_label_that_is_no_text_is_refused(label: str) -> None:
    name: Any = uuid.uuid4()
    with pytest.raises(InvalidRequestError, match=f"{label} must be a text") as caught:
        step("s", **{label: name})(lambda: None)()
    assert caught.value.param == label
    with pytest.raises(InvalidRequestError, match="must be a text"), workflow(session=name):
        pass
    with pytest.raises(InvalidRequestError, match="must be a text"), workflow(name):
        pass
    assert current_labels() == Labels()


def test_the_earliest_deadline_counts_and_the_remaining_time_is_sent() -> None:
    def left(deadline_s: float | None) -> Any:
        return step("s", deadline_s=deadline_s)(lambda: current_policy().deadline_s)()

    assert left(None) is None and 0 < left(7000) <= 7000
    with workflow("w", deadline=10_000):
        assert 7000 < left(None) <= 10_000 and left(2000) <= 2000 and 7000 < left(60_000) <= 10_000
        assert 7000 < float(headers()["x-agentspec-deadline-s"]) <= 10_000
    with workflow("w", deadline=1e-9):
        assert left(None) == left(5) == 0.001  # it is over, and nothing is refused for it


def test_wrong_values_are_refused_by_the_decorator() -> None:
    with pytest.raises(InvalidRequestError) as raised:
        step("plan", deadline_s=-1)
    assert raised.value.param == "deadline_s"
    with pytest.raises(InvalidRequestError), workflow("w", priority=-1):
        pass


def test_thread_pools_keep_the_labels() -> None:
    together = threading.Barrier(4)

    def work(number: int) -> Labels:
        together.wait(60)  # four threads are inside at once
        return current_labels()

    @step("spread", session="s")
    def spread() -> list[Labels]:
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(keep_labels(work), range(4)))

    assert spread() == [Labels("s", None, "spread")] * 4
