"""One pool of key/value memory: running answers, idle conversations, loans and drafts stay within it together."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch import TorchBackend
from agentspec.backends.torch.drafters.cheap import DrafterFactory
from agentspec.backends.torch.drafters.draft_model import DraftModel
from agentspec.backends.torch.engine.cache_session import CacheSession
from agentspec.backends.torch.engine.engine import Engine
from agentspec.backends.torch.engine.sequence import EngineContext, EngineRequest
from agentspec.backends.torch.model.kv_cache import SequenceCache
from agentspec.errors import OverloadedError
from agentspec.types import Delta, GenerateRequest, SamplingParams

ROW_BYTES = 256  # of the tiny model
SYSTEM = [n % 200 for n in range(0, 600, 7)]  # 86 tokens


class Watched:
    """An engine whose bytes of key/value slots are measured at every forward: those that exist, not those reserved."""

    def __init__(self, lab: Any, drafters: DrafterFactory | None = None, **settings: Any) -> None:
        context = EngineContext(lab.target, lab.tokenizer, drafters=drafters or DrafterFactory())
        self.caches: list[SequenceCache] = []
        self.engine = Engine(context, TorchSettings(**settings), lambda request: CacheSession(None))
        self.most = 0

    def ask(self, prompt: list[int], max_tokens: int = 6, **params: Any) -> Callable[[], tuple[list[int], Delta]]:
        told: queue.Queue[Delta | Exception] = queue.Queue()
        sampling = SamplingParams(temperature=0, **params.pop("sampling", {}))
        request = GenerateRequest("m", token_ids=prompt, sampling=sampling, **params)
        self.engine.submit(EngineRequest(request, prompt, max_tokens, frozenset(), None, told.put))

        def result() -> tuple[list[int], Delta]:
            tokens: list[int] = []
            while True:
                item = told.get(timeout=60)
                if isinstance(item, Exception):
                    raise item
                tokens += item.token_ids
                if item.finish_reason:
                    return tokens, item

        return result

    def measure(self) -> None:
        scheduler = self.engine.scheduler
        live = sum(cache.nbytes for cache in self.caches) + scheduler.prefix_cache.nbytes
        self.most = max(self.most, live)


@pytest.fixture
def watched(lab: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []
    forward = type(lab.target).forward_batch

    def measured(target: Any, items: Any) -> Any:
        outputs = forward(target, items)
        for one in made:
            known = {id(cache) for cache in one.caches}
            one.caches += [item.kv_cache for item in items if id(item.kv_cache) not in known]
            running = {id(sequence.kv_cache) for sequence in one.engine.scheduler.active}
            drafting = {id(each) for each in drafts_of(one.engine)}
            one.caches = [cache for cache in one.caches if id(cache) in running | drafting]
            one.measure()
        return outputs

    monkeypatch.setattr(type(lab.target), "forward_batch", measured)

    def make(**settings: Any) -> Watched:
        made.append(Watched(lab, **settings))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


def drafts_of(engine: Engine) -> list[Any]:
    found = [getattr(sequence._drafter, "_costly", None) for sequence in engine.scheduler.active]
    return [drafter._cache for drafter in found if drafter is not None]


def test_idle_conversations_use_all_that_running_ones_leave(watched: Any) -> None:
    """Ten conversations over one system prompt find all of their slots again: they need 86 + 10 * 14 rows."""
    one = watched(kv_bytes=ROW_BYTES * 1000)
    prompts = [[*SYSTEM, *range(n, n + 8)] for n in range(10)]
    answers = [one.ask(prompt)()[0] for prompt in prompts]
    cache = one.engine.scheduler.prefix_cache
    assert len(cache) == 10 and cache.nbytes <= (86 + 10 * 14) * ROW_BYTES
    for prompt, answer in zip(prompts, answers, strict=True):
        _, last = one.ask([*prompt, *answer, 1, 2])()
        assert last.usage.cached_tokens == len(prompt) + 5
    assert one.most <= 1000 * ROW_BYTES


def test_idle_conversations_give_way_to_running_ones(lab: Any, watched: Any) -> None:
    one = watched(kv_bytes=ROW_BYTES * 400, max_active=4)
    for n in range(8):
        one.ask([n, *range(60)])()
    assert one.engine.scheduler.prefix_cache.nbytes >= 300 * ROW_BYTES
    prompts = [[n, *range(100, 180)] for n in range(4)]
    running = [one.ask(prompt, 30) for prompt in prompts]
    for prompt, result in zip(prompts, running, strict=True):
        assert result()[0] == lab.oracle(prompt, SamplingParams(temperature=0), max_tokens=30, stop_ids=())
    assert one.most <= 400 * ROW_BYTES


def test_a_conversation_that_leaves_no_room_for_a_copy_of_itself_is_moved(watched: Any) -> None:
    one = watched(kv_bytes=ROW_BYTES * 500)
    prompt = [n % 100 for n in range(300)]
    answer, _ = one.ask(prompt)()
    _, last = one.ask([*prompt, *answer, 9])()
    assert last.usage.cached_tokens == 305 and one.most <= 500 * ROW_BYTES
    assert one.engine.scheduler.prefix_cache.nbytes == (307 + 5) * ROW_BYTES


def test_the_slots_of_a_draft_model_are_counted(lab: Any, watched: Any) -> None:
    drafters = DrafterFactory(("model",), DraftModel("small", lab.target))
    one = watched(kv_bytes=2 * ROW_BYTES * 250, drafters=drafters, max_active=4)
    assert one.engine.scheduler.kv_budget.limit == 250
    prompts = [[n, *range(50)] for n in range(5)]
    for prompt, result in [(prompt, one.ask(prompt, 16)) for prompt in prompts]:
        assert result()[0] == lab.oracle(prompt, SamplingParams(temperature=0), max_tokens=16, stop_ids=())
    assert one.most <= 2 * ROW_BYTES * 250


async def collect(backend: TorchBackend, request: GenerateRequest) -> list[int]:
    return [token async for delta in backend.generate(request) for token in delta.token_ids]


def count_turns(backend: TorchBackend, patch: pytest.MonkeyPatch) -> list[int]:
    turns, turn = [0], Engine.turn

    def counted(engine: Engine) -> None:
        turns[0] += 1
        turn(engine)

    patch.setattr(Engine, "turn", counted)
    return turns


@pytest.mark.anyio
async def test_steps_and_hidden_states_are_lent_their_slots(saved_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TorchBackend.load(TorchSettings(model=str(saved_model), device="cpu", kv_bytes=ROW_BYTES * 400))
    request = GenerateRequest("", text="Hello you", sampling=SamplingParams(max_tokens=200, temperature=0))
    session = await backend.open_steps(request)
    await session.run(lambda steps: steps.advance().logits.shape)
    used = backend.stats().kv_rows
    assert 200 < used <= 300
    with pytest.raises(OverloadedError):
        await (await backend.open_steps(request)).run(lambda steps: None)
    together = await backend.hidden_states([[5] * 60, [6] * 60, [7] * 10])  # in two forwards
    assert [len(states) for states in together] == [60, 60, 10] and backend.stats().kv_rows == used
    waiting = asyncio.create_task(collect(backend, replace(request, sampling=SamplingParams(max_tokens=120, seed=1))))
    while not backend.stats().queued:
        await asyncio.sleep(0)
    turns = count_turns(backend, monkeypatch)
    await session.run(lambda steps: None)
    await session.run(lambda steps: None)
    assert not waiting.done() and turns[0] <= 2  # what waits for slots does not keep the thread busy
    del session
    assert len(await waiting) <= 120 and backend.stats().kv_rows == 0
    await backend.aclose()
