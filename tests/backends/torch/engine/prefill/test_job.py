"""The queue of expected prompts: what it keeps, what it forgets, and what it counts."""

from __future__ import annotations

from typing import Any

import pytest

from agentspec.backends.torch.engine.prefill.job import JOB_SECONDS, MOST_JOBS, READINGS, PrefillQueue

TOKENS = list(range(40))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> PrefillQueue:
    return PrefillQueue(clock)


def test_a_job_is_due_until_it_is_settled_and_again_after_other_work(queue: PrefillQueue) -> None:
    queue.add("a", TOKENS)
    job = queue.due()
    assert job is not None and queue.due() is job
    queue.settle(job)
    assert queue.due() is None
    queue.arrived("a", [1, 2, 3])
    assert queue.due() is job


def test_the_expected_prompt_ends_the_job_whatever_the_last_tokens_became(queue: PrefillQueue) -> None:
    for prompt in ([*TOKENS, 7], [*TOKENS[:38], 99, 98]):
        queue.add("a", TOKENS)
        queue.arrived("b", prompt)
        assert len(queue) == 1
        queue.arrived("a", prompt)
        assert len(queue) == 0
    queue.add("a", TOKENS)
    queue.arrived("a", TOKENS[:30])
    assert len(queue) == 1 and queue.counts.used == 0


def test_jobs_that_nobody_came_for_end(queue: PrefillQueue, clock: Clock) -> None:
    queue.add("a", TOKENS)
    clock.now = JOB_SECONDS
    assert queue.due() is None and len(queue) == 0 and queue.counts.cancelled == 0
    queue.add("a", TOKENS)
    job = queue.due()
    assert job is not None
    queue.computed(job, READINGS * len(TOKENS))
    assert queue.due() is None and queue.counts.cancelled == 1


def test_the_oldest_give_way_and_the_same_prompt_is_expected_once(queue: PrefillQueue) -> None:
    for n in range(MOST_JOBS + 5):
        queue.add("a", [n, *TOKENS])
        queue.add("a", [n, *TOKENS])
    first: Any = queue.due()
    assert len(queue) == MOST_JOBS and first.tokens[0] == 5


def test_a_tenant_that_expects_much_takes_nothing_from_another(queue: PrefillQueue) -> None:
    queue.add("b", TOKENS)
    for n in range(2 * MOST_JOBS):
        queue.add("a", [n, *TOKENS])
    assert len(queue) == MOST_JOBS
    first: Any = queue.due()
    assert first.tenant == "b"


def test_a_prompt_that_is_expected_again_was_not_read_the_less(queue: PrefillQueue) -> None:
    queue.add("a", TOKENS)
    first = queue.due()
    assert first is not None
    queue.computed(first, 30)
    queue.add("a", TOKENS)
    again = queue.due()
    assert again is not first and again is not None and again.read == 30
    queue.cancel(again)
    queue.cancel(again)
    assert (queue.counts.launched, queue.counts.cancelled) == (1, 1)
