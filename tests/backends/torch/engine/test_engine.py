"""The engine behind `generate`: slots of earlier calls, memory, cancellation, several choices and several engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.backends.torch.drafters.draft_model import DraftModel
from agentspec.errors import ContextLengthError, OverloadedError
from agentspec.types import Delta, GenerateRequest, SamplingParams
from tests.conftest import costly

pytestmark = pytest.mark.anyio

SLOT_BYTES = 256  # of the tiny model
PROMPT = list(range(20, 40))


@pytest.fixture
async def backend_of(lab: Any) -> AsyncIterator[Any]:
    async with AsyncExitStack() as stack:

        def make(small: DraftModel | None = None, keeps_prefixes: bool = True, **settings: Any) -> TorchBackend:
            backend = TorchBackend(lab.loaded, TorchSettings(**settings), None, small, keeps_prefixes=keeps_prefixes)
            stack.push_async_callback(backend.aclose)
            return backend

        yield make


def ask(prompt: list[int], max_tokens: int = 6, *, seed: int | None = None, **fields: Any) -> GenerateRequest:
    temperature = 0.0 if seed is None else 1.0
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest("tiny", token_ids=prompt, sampling=sampling, **fields)


async def answer(backend: TorchBackend, request: GenerateRequest) -> tuple[list[int], Delta]:
    deltas = [delta async for delta in backend.generate(request)]
    return [token for delta in deltas for token in delta.token_ids], deltas[-1]


def oracle(lab: Any, request: GenerateRequest) -> list[int]:
    sampling, length = request.sampling, request.sampling.max_tokens
    return lab.oracle(request.token_ids, sampling, max_tokens=length, stop_ids=())  # type: ignore[no-any-return]


async def resting(backend: TorchBackend) -> None:
    while backend.stats().active or backend.stats().queued:
        await asyncio.sleep(0.005)


async def test_the_next_prompt_of_a_conversation_is_not_computed_again(lab: Any, backend_of: Any) -> None:
    backend = backend_of()
    first, last = await answer(backend, ask(PROMPT, 10, seed=0))
    assert last.usage.cached_tokens == 0
    request = ask([*PROMPT, *first, 1, 2, 3], 10, seed=0)
    second, last = await answer(backend, request)
    assert last.usage.cached_tokens == len(PROMPT) + 9  # the last token of an answer has no slot yet
    assert second == oracle(lab, request)
    other = ask(list(request.token_ids or ()), 10, tenant="other")
    assert (await answer(backend, other))[1].usage.cached_tokens == 0


@pytest.mark.parametrize(("settings", "fields"), [({}, {"store": False}), ({"keeps_prefixes": False}, {})])
async def test_a_request_without_store_leaves_no_slots(backend_of: Any, settings: Any, fields: Any) -> None:
    backend = backend_of(**settings)
    for _ in range(2):
        assert (await answer(backend, ask(PROMPT, **fields)))[1].usage.cached_tokens == 0


async def test_cancelling_frees_a_waiting_and_an_active_slot(lab: Any, backend_of: Any) -> None:
    backend = backend_of(max_active=1)
    active = backend.generate(ask([5] * 150, 300))
    await anext(active)
    waiting = asyncio.ensure_future(answer(backend, ask(PROMPT)))
    while not backend.stats().queued:
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert backend.stats().queued == 0 and backend.stats().active == 1
    await active.aclose()
    request = ask([5] * 150, 8)
    tokens, last = await answer(backend, request)
    assert tokens == oracle(lab, request) and last.usage.cached_tokens == 0  # what was cut is not stored
    assert backend.stats().cancelled == 2 and backend.stats().tokens < 300


@costly
@given(st.lists(st.tuples(st.integers(1, 100), st.integers(1, 12), st.integers(0, 2)), min_size=1, max_size=6))
async def test_answers_wait_for_their_memory_and_are_whole(lab: Any, shapes: list[tuple[int, int, int]]) -> None:
    """Room for two or three at once, some of which are cut off by their reader."""
    backend = TorchBackend(lab.loaded, TorchSettings(kv_bytes=SLOT_BYTES * 260, max_active=4))
    requests = [ask([n, *range(length)], most, seed=seed or None) for n, (length, most, seed) in enumerate(shapes)]
    tasks = [asyncio.ensure_future(answer(backend, request)) for request in requests]
    while not all(task.done() for task in tasks):
        assert backend.stats().kv_rows <= 260
        await asyncio.sleep(0.002)
        if len(tasks) > 3:
            tasks.pop().cancel()
    for task, request in zip(tasks, requests, strict=False):
        assert (await task)[0] == oracle(lab, request)
    await resting(backend)
    assert backend.stats().kv_rows == 0 and backend.stats().failed == 0
    await backend.aclose()


async def test_a_request_that_can_never_fit_is_refused_and_the_setting_named(backend_of: Any) -> None:
    backend = backend_of(kv_bytes=SLOT_BYTES * 200)
    with pytest.raises(ContextLengthError, match="ask for fewer tokens or raise kv_bytes") as caught:
        await answer(backend, ask(PROMPT, 117))
    assert caught.value.param == "max_tokens" and len((await answer(backend, ask(PROMPT, 116)))[0]) == 116


async def test_a_conversation_that_leaves_no_room_for_a_copy_of_itself_is_moved(backend_of: Any) -> None:
    backend = backend_of(kv_bytes=SLOT_BYTES * 500)
    prompt = [n % 100 for n in range(300)]
    tokens, _ = await answer(backend, ask(prompt))
    assert (await answer(backend, ask([*prompt, *tokens, 9])))[1].usage.cached_tokens == 305


async def test_the_slots_of_a_draft_model_are_counted(lab: Any, backend_of: Any) -> None:
    backend = backend_of(DraftModel("small", lab.target), kv_bytes=2 * SLOT_BYTES * 250, max_active=4)
    requests = [ask([n, *range(50)], 16) for n in range(5)]
    for request, (tokens, _) in zip(
        requests, await asyncio.gather(*(answer(backend, r) for r in requests)), strict=True
    ):
        assert tokens == oracle(lab, request)
    with pytest.raises(ContextLengthError):
        await answer(backend, ask([1] * 51, 136))


async def test_steps_and_hidden_states_reserve_slots(backend_of: Any) -> None:
    backend = backend_of(kv_bytes=SLOT_BYTES * 400)
    session = await backend.open_steps(ask(PROMPT, 200))
    await session.run(lambda steps: steps.advance().logits.shape)
    used = backend.stats().kv_rows
    assert 200 < used <= 300
    with pytest.raises(OverloadedError):
        await (await backend.open_steps(ask(PROMPT, 200))).run(lambda steps: None)
    together = await backend.hidden_states([[5] * 60, [6] * 60, [7] * 10])  # in two forwards
    assert [len(states) for states in together] == [60, 60, 10] and backend.stats().kv_rows == used
    waiting = asyncio.create_task(answer(backend, ask(PROMPT, 120)))
    while not backend.stats().queued:
        await asyncio.sleep(0)
    await session.run(lambda steps: None)
    assert not waiting.done()
    del session
    assert len((await waiting)[0]) == 120 and backend.stats().kv_rows == 0


async def test_two_engines_compute_in_one_thread_and_take_turns(lab: Any, backend_of: Any) -> None:
    backends, request = [backend_of(), backend_of()], ask(PROMPT, 40, seed=0)
    found = await asyncio.gather(*(answer(backend, request) for backend in backends for _ in range(2)))
    assert [tokens for tokens, _ in found] == [oracle(lab, request)] * 4
    assert [thread.name for thread in threading.enumerate()].count("agentspec-cpu") == 1
    await backends[0].aclose()
    assert (await answer(backends[1], request))[0] == oracle(lab, request)


async def test_an_answer_that_is_not_read_waits_in_few_pieces(backend_of: Any) -> None:
    backend, request = backend_of(), ask(PROMPT, 100, seed=3)
    want, _ = await answer(backend, request)
    stream = backend.generate(request)
    got = list((await anext(stream)).token_ids)
    await resting(backend)
    rest = [delta async for delta in stream]
    assert len(rest) <= 2 and got + [token for delta in rest for token in delta.token_ids] == want
