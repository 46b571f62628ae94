"""What is asked of model calls: inherited, narrowed, and carried into threads."""

from __future__ import annotations

import asyncio
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from agentspec.errors import InvalidRequestError
from agentspec.step import scope
from agentspec.step.decorator import step
from agentspec.step.report import headers
from agentspec.step.scope import (
    StepPolicy,
    current_labels,
    current_policy,
    keep_labels,
    workflow,
)
from agentspec.types import Labels

pytestmark = pytest.mark.anyio


def test_steps_inherit_what_they_do_not_ask_for() -> None:
    @step("inner", priority=1, model="small")
    def inner() -> StepPolicy:
        return current_policy()

    @step("outer", strategy="plain", priority=5, latency_ms_per_token=30, store=False)
    def outer() -> StepPolicy:
        return inner()

    assert outer() == StepPolicy("plain", "small", 30, None, 1, False, None)
    assert current_policy() == StepPolicy()


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


def test_the_earliest_deadline_counts_and_what_is_left_of_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(scope, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def left(deadline_s: float | None) -> float | None:
        return step("s", deadline_s=deadline_s)(lambda: current_policy().deadline_s)()

    assert left(None) is None and left(7) == 7
    with workflow("w", deadline=10):
        now[0] += 4
        assert (left(None), left(2), left(60)) == (6, 2, 6)
        assert headers()["x-agentspec-deadline-s"] == "6"
        now[0] += 60
        assert left(None) == left(5) == 0.001  # it is over, and nothing is refused for it


def test_headers_carry_the_policy() -> None:
    policy = StepPolicy(strategy="specreason", latency_ms_per_token=12.5, priority=2, store=False, speculation=False)
    with workflow("w", policy=policy, priority=3):
        assert headers() == {
            "x-agentspec-workflow": "w",
            "x-agentspec-strategy": "specreason",
            "x-agentspec-latency-ms-per-token": "12.5",
            "x-agentspec-priority": "3",
            "x-agentspec-store": "off",
            "x-agentspec-speculation": "off",
        }


def test_wrong_values_are_refused_where_they_are_written() -> None:
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


async def test_event_loops_of_other_threads_keep_the_labels() -> None:
    async def inside() -> Labels:
        return current_labels()

    with workflow("w"):
        run: Any = keep_labels(asyncio.run)
        with ThreadPoolExecutor(1) as pool:
            assert await asyncio.wrap_future(pool.submit(run, inside())) == Labels(workflow="w")
