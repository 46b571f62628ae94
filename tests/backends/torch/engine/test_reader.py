"""Reading ahead: answers stay what they are, slots stay within the budget, and nobody waits for more than a chunk."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.backends.torch.engine import prefill as reader_module
from agentspec.backends.torch.engine.prefill import JOB_SECONDS, MOST_JOBS, PrefillQueue, PrefillReader
from agentspec.errors import OverloadedError
from agentspec.speculation.governor import CHUNKS
from agentspec.types import SamplingParams

ROW_BYTES = 256
GREEDY = SamplingParams(temperature=0)
TEXTS = [[n * k % 200 for n in range(1, length)] for k, length in ((3, 40), (7, 90), (7, 60), (11, 150))]

ask = st.tuples(st.just("ask"), st.sampled_from(TEXTS), st.sampled_from([0, 9]), st.sampled_from(["a", "b"]))
read = st.tuples(st.just("read"), st.sampled_from(TEXTS), st.sampled_from([1, 12]), st.sampled_from(["a", "b"]))
turns = st.tuples(st.just("turns"), st.integers(1, 5), st.just(0), st.just(""))
cancel = st.tuples(st.just("cancel"), st.integers(0, 3), st.just(0), st.just(""))
interleavings = st.lists(st.one_of(ask, read, turns, cancel), max_size=14)


budgets, chunks = st.sampled_from([170, 330, 900]), st.sampled_from([8, 24])


@given(interleavings, budgets, chunks)
@settings(max_examples=7)
def test_any_interleaving_leaves_answers_and_the_budget_as_they_are(
    lab: Any, stepped: Any, steps: Any, slots: int, chunk: int
) -> None:
    interleave(lab, stepped, steps, slots, chunk)


@pytest.mark.slow
@given(interleavings, budgets, chunks)
@settings(max_examples=50)
def test_any_of_many_interleavings(lab: Any, stepped: Any, steps: Any, slots: int, chunk: int) -> None:
    interleave(lab, stepped, steps, slots, chunk)


def interleave(lab: Any, stepped: Any, steps: Any, slots: int, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_module, "CHUNKS", (chunk,))
        one = stepped(kv_bytes=ROW_BYTES * slots, max_active=2)
        answers = []
        for kind, what, more, tenant in steps:
            if kind == "ask" and len(what) + more + 4 + 64 <= slots:
                try:
                    answers.append(one.ask([*what, *range(more)], 4, tenant=tenant))
                except OverloadedError:
                    continue
            elif kind == "read":
                one.engine.prefill(tenant, [*what, *range(more)])
            elif kind == "turns":
                for _ in range(what):
                    one.turn()
            elif kind == "cancel" and what < len(answers):
                one.engine.cancel(answers[what].request)
        one.run()
        for answer in answers:
            if not answer.request.cancelled:
                assert answer.error is None
                assert answer.tokens == lab.oracle(answer.request.prompt, GREEDY, max_tokens=4, stop_ids=())
        assert one.scheduler.kv_budget.lent == 0 and one.scheduler.idle
        one.end()


def long_prompt(seed: int = 3, length: int = 300) -> list[int]:
    return [n * seed % 200 for n in range(1, length)]


def test_what_was_read_is_found_by_its_request(stepped: Any) -> None:
    one, known = stepped(kv_bytes=ROW_BYTES * 1000), long_prompt()
    assert one.engine.prefill("default", known)
    one.run()
    answer = one.ask([*known, 5, 6, 7])
    one.run()
    assert answer.last.usage.cached_tokens == len(known)
    counts = one.reader.queue.counts
    assert counts == {"launched": 1, "used": 1, "cancelled": 0, "tokens": len(known)}


def test_work_waits_for_the_chunk_that_is_read_and_no_more(stepped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "CHUNKS", (32,))
    one, known = stepped(kv_bytes=ROW_BYTES * 1000), long_prompt()
    one.engine.prefill("default", known)
    one.turn()
    one.turn()
    assert one.reader.queue.counts["tokens"] == 64
    answer = one.ask([1, 2, 3])
    while answer.last is None:
        assert one.engine.ready and not one.reader.ready  # all turns are the request's
        one.turn()
    assert one.reader.queue.counts["tokens"] == 64
    one.run()  # what was read is not read again
    assert one.reader.queue.counts["tokens"] == len(known)


def test_a_forward_that_fails_costs_the_job_alone(stepped: Any, lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = stepped(kv_bytes=ROW_BYTES * 1000)
    with monkeypatch.context() as patch:
        patch.setattr(PrefillReader, "_read_chunk", lambda *_: 1 / 0)
        one.engine.prefill("default", long_prompt())
        one.run()
    assert not one.reader.queue.jobs and one.scheduler.kv_budget.lent == 0 and one.engine.failure is None
    answer = one.ask([1, 2, 3])
    one.run()
    assert answer.tokens == lab.oracle([1, 2, 3], GREEDY, max_tokens=6, stop_ids=())


def test_loans_for_other_work_come_first(stepped: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "CHUNKS", (32,))
    one = stepped(kv_bytes=ROW_BYTES * 420)
    one.engine.prefill("default", long_prompt())
    one.turn()
    give_back = one.engine.lend(400)
    assert one.scheduler.kv_budget.lent == 400
    one.reader.turn()  # no room for the rest
    give_back()
    assert one.scheduler.kv_budget.lent == 0


def test_a_chunk_takes_no_longer_than_it_may(stepped: Any) -> None:
    one = stepped()
    cost = one.engine.context.governor.cost
    cost.calibrate([(1, 0, 0.001), (64, 0, 0.04), (256, 0, 0.16)])
    one.engine.prefill("default", long_prompt())
    one.turn()
    assert 48 <= one.reader.queue.counts["tokens"] <= 96
    cost.calibrate([(1, 0, 1.0), (256, 0, 9.0)])
    read = one.reader.queue.counts["tokens"]
    one.turn()
    assert one.reader.queue.counts["tokens"] == read + CHUNKS[-1]


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
    return PrefillQueue(Counter(), clock)


def test_the_expected_prompt_ends_the_job_whatever_the_last_tokens_became(queue: PrefillQueue) -> None:
    for prompt in ([*TOKENS, 7], [*TOKENS[:38], 99, 98]):
        queue.add("a", TOKENS)
        queue.arrived("b", prompt)
        assert len(queue.jobs) == 1
        queue.arrived("a", prompt)
        assert len(queue.jobs) == 0
    queue.add("a", TOKENS)
    queue.arrived("a", TOKENS[:30])
    assert len(queue.jobs) == 1 and queue.counts["used"] == 0


def test_jobs_that_nobody_came_for_end(queue: PrefillQueue, clock: Clock) -> None:
    queue.add("a", TOKENS)
    clock.now = JOB_SECONDS
    assert queue.due() is None and len(queue.jobs) == 0 and queue.counts["cancelled"] == 0
    queue.add("a", TOKENS)
    job = queue.due()
    assert job is not None
    queue.computed(job, 4)
    clock.now = 2 * JOB_SECONDS
    assert queue.due() is None and queue.counts["cancelled"] == 1


def test_a_tenant_that_expects_much_takes_nothing_from_another(queue: PrefillQueue) -> None:
    queue.add("b", TOKENS)
    for n in range(2 * MOST_JOBS):
        queue.add("a", [n, *TOKENS])
    assert len(queue.jobs) == MOST_JOBS
    first: Any = queue.due()
    assert first.tenant == "b"


def test_another_tenant_finds_nothing_of_it(stepped: Any) -> None:
    one, known = stepped(kv_bytes=ROW_BYTES * 1000), long_prompt()
    one.engine.prefill("a", known)
    one.run()
    answer = one.ask([*known, 5], tenant="b")
    one.run()
    assert answer.last.usage.cached_tokens == 0 and one.reader.queue.counts["used"] == 0
