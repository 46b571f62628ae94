"""KV slots whose content tells the tokens that they are of, memory in which answers meet while they grow, and an engine
whose turns the test takes itself, so that every interleaving can be tried.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch.engine import engine as engine_module
from agentspec.backends.torch.engine.cache_session import CacheSession
from agentspec.backends.torch.engine.compute_thread import ComputeThread
from agentspec.backends.torch.engine.engine import Engine
from agentspec.backends.torch.engine.kv_budget import KVBudget
from agentspec.backends.torch.engine.sequence import EngineContext, EngineRequest
from agentspec.backends.torch.model.kv_cache import SequenceCache
from agentspec.types import Delta, GenerateRequest, SamplingParams

ROW_BYTES = 256  # of the tiny model


def slots_of(tokens: Sequence[int]) -> SequenceCache:
    """A cache of one layer whose keys and values are the token ids themselves."""
    cache = SequenceCache(len(tokens))
    values = torch.tensor(tokens, dtype=torch.float32).view(1, 1, -1, 1)
    cache.update(values, values, 0)
    cache.commit(len(tokens), ())
    return cache


class Tight(KVBudget):
    """Begins with little, so that answers meet while they grow; what was preempted waits until it fits whole."""

    def initial(self, request: EngineRequest, tokens: int | None = None) -> int:
        return len(request.prompt) + 20 if tokens is None or tokens == len(request.prompt) else self.most(request)


def tighten(engine: Engine, slots: int) -> None:
    """Leave an engine room for so many slots."""
    engine.scheduler.kv_budget = Tight(slots, engine.scheduler.kv_budget.slot_bytes)


class Answer:
    """What one request was told so far."""

    def __init__(self, request: EngineRequest) -> None:
        self.request, self.tokens, self.last = request, list[int](), None
        self.error: Exception | None = None
        request.deliver = self.deliver

    def deliver(self, item: Delta | Exception) -> None:
        if isinstance(item, Exception):
            self.error = item
            return
        self.tokens += item.token_ids
        self.last = item if item.finish_reason else None


class SteppedEngine:
    """An engine without a thread. `turn` does what the thread would do next, and checks what must always hold."""

    def __init__(self, lab: Any, keeps_prefixes: bool = True, **settings: Any) -> None:
        self.thread = ComputeThread("nobody")
        self.thread._thread = threading.current_thread()  # so that no other one is started
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_module, "compute_thread", lambda device: self.thread)
            context = EngineContext(lab.target, lab.tokenizer)
            self.engine = Engine(
                context, TorchSettings(**settings), lambda request: CacheSession(None), keeps_prefixes=keeps_prefixes
            )
        self.reader, self.scheduler = self.engine.reads_ahead(), self.engine.scheduler

    def ask(self, prompt: list[int], max_tokens: int = 6, **params: Any) -> Answer:
        request = GenerateRequest("m", token_ids=prompt, sampling=SamplingParams(temperature=0), **params)
        answer = Answer(EngineRequest(request, prompt, max_tokens, frozenset(), None, lambda item: None))
        self.engine.submit(answer.request)
        return answer

    def turn(self) -> bool:
        """One turn of the worker that is next; False if nobody has anything to do."""
        with torch.inference_mode():
            if self.engine.ready:
                self.engine.turn()
            elif self.reader.ready:
                self.reader.turn()
            else:
                return False
        self.check()
        return True

    def run(self) -> None:
        while self.turn():
            pass

    def check(self) -> None:
        """All slots that exist, and all that are reserved, are within the budget."""
        limit = self.scheduler.kv_budget.limit
        caches = [*(sequence.kv_cache for sequence in self.scheduler.active), self.reader._cache]
        live = sum(cache.nbytes for cache in caches if cache is not None)
        assert self.scheduler.kv_slots <= limit
        assert live + self.scheduler.prefix_cache.nbytes <= limit * ROW_BYTES
        assert self.reader._cache is not None or self.scheduler.kv_budget.lent == 0

    def end(self) -> None:
        self.engine.close()
        with torch.inference_mode():
            self.engine.turn()
        assert self.scheduler.kv_slots == 0 and self.scheduler.prefix_cache.nbytes == 0 and not self.reader.queue.jobs


@pytest.fixture
def stepped(lab: Any) -> Iterator[Callable[..., SteppedEngine]]:
    made: list[SteppedEngine] = []

    def make(other: Any = None, **settings: Any) -> SteppedEngine:
        made.append(SteppedEngine(other or lab, **settings))
        return made[-1]

    yield make
    for one in made:
        one.end()
