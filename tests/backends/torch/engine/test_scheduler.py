"""The scheduler by itself: whom it admits, whom it preempts, and how it divides a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch.engine.cache_session import CacheSession
from agentspec.backends.torch.engine.scheduler import Scheduler
from agentspec.backends.torch.engine.sequence import EngineContext, EngineRequest
from agentspec.backends.torch.engine.sequence import Sequence as EngineSequence
from agentspec.errors import ShuttingDownError
from agentspec.speculation.governor import CHUNKS
from agentspec.types import GenerateRequest, SamplingParams

PROMPT = list(range(20, 40))


def request_of(prompt: list[int] = PROMPT, *, max_tokens: int = 8, **params: Any) -> EngineRequest:
    original = GenerateRequest("m", token_ids=prompt, sampling=SamplingParams(), **params)
    return EngineRequest(original, prompt, max_tokens, frozenset(), None, lambda item: None)


@pytest.fixture
def scheduler_of(lab: Any) -> Callable[..., Scheduler]:
    return lambda **settings: Scheduler(EngineContext(lab.target, lab.tokenizer), TorchSettings(**settings))


@pytest.fixture
def opened(lab: Any) -> Callable[[EngineRequest, Any], EngineSequence]:
    context = EngineContext(lab.target, lab.tokenizer)
    return lambda request, preempted: EngineSequence(request, context, lab.target.new_cache(1), CacheSession(None))


def test_a_prompt_is_read_in_chunks_behind_the_sequences_that_draw(scheduler_of: Any, opened: Any) -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of([1]))
    scheduler.add(request_of(PROMPT * 20))
    first, second = scheduler.schedule(opened)
    assert (first.num_tokens, first.draws) == (1, True)
    assert second.num_tokens in CHUNKS and not second.draws
    assert second.batch_item.tokens == second.sequence.tokens[: second.num_tokens]


def test_alone_a_prompt_takes_the_largest_chunk_and_draws_behind_its_last_token(scheduler_of: Any, opened: Any) -> None:
    scheduler = scheduler_of()
    scheduler.add(request_of(PROMPT * 20))
    (only,) = scheduler.schedule(opened)
    assert (only.num_tokens, only.draws) == (CHUNKS[0], False)
    scheduler = scheduler_of()
    scheduler.add(request_of())
    (only,) = scheduler.schedule(opened)
    assert (only.num_tokens, only.draws) == (len(PROMPT), True)


@pytest.mark.parametrize("priorities", [(5, 0), (1, 1), (0, 5)])
def test_no_priority_takes_the_slot_of_what_runs(scheduler_of: Any, opened: Any, priorities: Any) -> None:
    scheduler = scheduler_of(max_active=1)
    for priority in priorities:
        scheduler.add(request_of(priority=priority))
        scheduler.schedule(opened)
    assert [sequence.request.original.priority for sequence in scheduler.active] == [priorities[0]]
    assert scheduler.num_waiting == 1 and scheduler.has_work


@pytest.mark.parametrize("priorities", [[1, 1, 1], [2, 0, 1, 0, 2, 1, 0], [3, 2, 1, 0]])
def test_the_lowest_priority_is_first_and_among_equals_what_came_first(
    scheduler_of: Any, opened: Any, priorities: list[int]
) -> None:
    scheduler = scheduler_of(max_active=1)
    requests = [request_of(priority=priority) for priority in priorities]
    for request in requests:
        scheduler.add(request)
    served = []
    while scheduler.has_work:
        scheduler.schedule(opened)
        served.append(scheduler.active[0].request)
        scheduler.remove(scheduler.active[0], clean=True)
    assert served == sorted(requests, key=lambda request: request.original.priority)


def test_what_was_cancelled_is_gone_and_what_was_not_is_handed_back_at_the_end(scheduler_of: Any, opened: Any) -> None:
    scheduler = scheduler_of(max_active=1)
    running, waiting, cancelled = request_of(), request_of(), request_of()
    for request in (running, waiting, cancelled):
        scheduler.add(request)
    scheduler.schedule(opened)
    assert scheduler.cancel(cancelled) and not scheduler.cancel(cancelled)
    assert set(map(id, scheduler.clear())) == {id(running), id(waiting)}
    assert not scheduler.has_work and scheduler.kv_slots == 0
    with pytest.raises(ShuttingDownError):
        scheduler.add(request_of())
