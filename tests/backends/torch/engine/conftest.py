"""KV slots whose content tells the tokens that they are of, and memory in which answers meet while they grow."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentspec.backends.torch.engine.engine import Engine
from agentspec.backends.torch.engine.kv_budget import KVBudget
from agentspec.backends.torch.engine.request import EngineRequest
from agentspec.backends.torch.model.kv_cache import SequenceCache


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
