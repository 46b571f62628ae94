"""The scheduler by itself: the order of requests, their memory, and how a step is divided."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch.engine import device_memory
from agentspec.backends.torch.engine.device_memory import available, budget_of, release
from agentspec.backends.torch.engine.kv_budget import ROOM
from agentspec.backends.torch.engine.prefill import MOST_EXPECTED, Guesses
from agentspec.backends.torch.engine.scheduler import Scheduler
from agentspec.backends.torch.engine.sequence import EngineContext, EngineRequest
from agentspec.backends.torch.engine.sequence import Sequence as EngineSequence
from agentspec.errors import ConfigurationError
from agentspec.speculation.governor import CHUNKS
from agentspec.types import GenerateRequest, SamplingParams
from tests.backends.torch.conftest import ScriptedSession

PROMPT = list(range(20, 40))
SLOT_BYTES = 256  # of the tiny model


def request_of(prompt: list[int] = PROMPT, *, max_tokens: int = 8, **params: Any) -> EngineRequest:
    original = GenerateRequest("m", token_ids=prompt, sampling=SamplingParams(), speculation=False, **params)
    return EngineRequest(original, prompt, max_tokens, frozenset(), None, lambda item: None)


@pytest.fixture
def scheduler_of(lab: Any) -> Callable[..., Scheduler]:
    def make(**settings: Any) -> Scheduler:
        context = EngineContext(lab.target, lab.tokenizer)
        scheduler = Scheduler(context, TorchSettings(**settings))
        scheduler.guesses = Guesses(scheduler, context)
        return scheduler

    return make


@pytest.fixture
def opened(lab: Any) -> Callable[[EngineRequest], EngineSequence]:
    context = EngineContext(lab.target, lab.tokenizer)

    def open_sequence(request: EngineRequest, cache: Any = None) -> EngineSequence:
        cache = cache or lab.target.new_cache(len(request.prompt) + request.max_tokens + ROOM)
        return EngineSequence(request, context, cache, ScriptedSession(lambda text, budget: None, request.prompt))

    return open_sequence


shapes = st.tuples(st.integers(0, 3), st.integers(1, 90), st.booleans())


@given(st.lists(shapes, max_size=12), st.integers(1, 3), st.integers(160, 500))
def test_requests_begin_in_their_order_within_memory_and_all_of_them(
    scheduler_of: Any, opened: Any, asked: list[tuple[int, int, bool]], most: int, slots: int
) -> None:
    scheduler, begun = scheduler_of(max_active=most, kv_bytes=SLOT_BYTES * slots), list[EngineRequest]()
    requests = [request_of(priority=priority, max_tokens=length) for priority, length, _ in asked]
    requests = [one for one in requests if scheduler.kv_budget.needed(one) <= slots]
    for request in requests:
        scheduler.add(request)
    left = [one for one, (_, _, cut) in zip(requests, asked, strict=False) if not (cut and scheduler.cancel(one))]

    def start(request: EngineRequest) -> EngineSequence:
        begun.append(request)
        return opened(request)  # type: ignore[no-any-return]

    while scheduler.has_work:
        scheduler.schedule(start)
        assert scheduler.kv_slots <= slots and 0 < len(scheduler.active) <= most
        scheduler.remove(scheduler.active[len(begun) % len(scheduler.active)], clean=True)
    assert scheduler.idle and begun == sorted(left, key=lambda one: one.original.priority)


def guess_of(tokens: list[int], tenant: str = "a") -> EngineRequest:
    guess = request_of(tokens, tenant=tenant)
    guess.guess = True
    return guess


def read(lab: Any, scheduler: Scheduler, opened: Any) -> list[int]:
    """Read one chunk of what is expected; its tokens."""
    (each,) = scheduler.schedule(opened)
    item = each.batch_item
    lab.target.forward_batch([item])
    each.sequence.commit_chunk(each.num_tokens)
    if each.sequence.finished:
        scheduler.remove(each.sequence, clean=True)
    return list(item.tokens)


@torch.inference_mode()
def test_an_expected_prompt_is_read_in_idle_time_and_found(lab: Any, scheduler_of: Any, opened: Any) -> None:
    """It pauses for a request, goes on where it stood, and ends where the request that was expected comes."""
    scheduler, known = scheduler_of(), [n * 3 % 200 for n in range(500)]
    assert scheduler.guesses.expect(guess_of(known[:400]), 0) and not scheduler.has_work and scheduler.has_guess
    chunk = len(read(lab, scheduler, opened))
    assert chunk in CHUNKS and not scheduler.has_work and not scheduler.idle
    scheduler.add(request_of())
    assert scheduler.has_work and not scheduler.has_guess
    (running,) = scheduler.schedule(opened)
    assert running.sequence.request.prompt == PROMPT
    scheduler.remove(running.sequence, clean=False)
    assert scheduler.prefix_cache.find("a", known, 1).length == chunk
    while scheduler.has_guess:
        read(lab, scheduler, lambda request: opened(request, scheduler.allocate(request)))
    prefills = scheduler._context.counters.prefills
    assert (prefills["launched"], prefills["tokens"]) == (1, 400)
    for tenant, used in (("b", 0), ("a", 1), ("a", 1)):
        found = scheduler.allocate(request_of([*known[:398], 1, 2, 3], tenant=tenant))
        assert (found.length, prefills["used"]) == (398 if used else 0, used)
    assert scheduler.guesses.expect(guess_of(known), 0)
    scheduler.add(request_of([*known[:498], 9], tenant="a"))
    scheduler.clear()
    assert not scheduler.has_guess and scheduler.prefix_cache.nbytes == 0


def test_a_tenant_that_expects_much_takes_nothing_from_another(scheduler_of: Any, opened: Any) -> None:
    scheduler = scheduler_of()
    for n in range(2 * MOST_EXPECTED):
        assert scheduler.guesses.expect(guess_of([n, *PROMPT]), 0)
        assert n or scheduler.guesses.expect(guess_of(PROMPT, "b"), 0)
    served = set()
    for _ in range(MOST_EXPECTED):
        (each,) = scheduler.schedule(opened)
        served.add(each.sequence.request.tenant)
        scheduler.remove(each.sequence, clean=False)
    assert served == {"a", "b"} and scheduler.idle and not scheduler.has_guess


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Says how many bytes every device has free; no engine has been promised any."""
    monkeypatch.setattr(device_memory, "_PROMISED", weakref.WeakSet())
    return lambda bytes: monkeypatch.setattr(device_memory, "free_memory", lambda device: bytes)


def test_two_engines_on_one_device_are_not_promised_the_same_memory(lab: Any, free: Any, caplog: Any) -> None:
    free(1 << 20)
    first, second = budget_of(lab.target, None), budget_of(lab.target, None)
    assert [one.promised for one in (first, second)] == [1 << 19, 1 << 18]
    release(second)
    assert available(first.device) == 1 << 19
    first.allocated = lambda: 1 << 18  # these bytes are not free any more
    assert available(first.device) == 3 << 18
    assert budget_of(lab.target, 3 << 20).promised == 3 << 20 and "kv_bytes promises 3 MiB of cpu" in caplog.text
    free(256)
    with pytest.raises(ConfigurationError, match="set kv_bytes") as caught:
        budget_of(lab.target, None)
    assert caught.value.param == "kv_bytes"
