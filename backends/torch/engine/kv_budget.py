"""The budget of KV slots of all active sequences: decides which request may start and which sequence may grow."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agentspec.backends.torch.engine.request import EngineRequest
from agentspec.backends.torch.engine.sequence import Sequence
from agentspec.backends.torch.model.kv_cache import GROWTH, SequenceCache
from agentspec.backends.torch.model.target import TargetModel
from agentspec.errors import ContextLengthError

ROOM = 64  # slots reserved for drafts, beyond prompt and answer
AHEAD = 8 * ROOM  # slots that a sequence starts with, beyond its prompt
DEFAULT_BYTES = 4 << 30
CUDA_SHARE = 0.8  # share of the memory that is free after the model is loaded


@dataclass(frozen=True, slots=True)
class KVBudget:
    """A limit of `limit` KV slots in all, or None if the model's slots cannot be counted. A slot has `slot_bytes`."""

    limit: int | None
    slot_bytes: int = 0

    @classmethod
    def of(cls, target: TargetModel, wanted_bytes: int | None) -> KVBudget:
        slot_bytes = target.slot_bytes()
        if not slot_bytes:
            return cls(None)
        return cls((default_bytes(target.device) if wanted_bytes is None else wanted_bytes) // slot_bytes, slot_bytes)

    def check(self, request: EngineRequest) -> None:
        """Raise `ContextLengthError` for a request that would not fit even if it were alone."""
        slots = max_slots(request)
        if self.limit is not None and slots > self.limit:
            needed, allowed = slots * self.slot_bytes >> 20, self.limit * self.slot_bytes >> 20
            message = (
                f"{len(request.prompt)} prompt tokens and {request.max_tokens} more need {needed} MiB of key/value"
                f" memory, and kv_bytes allows {allowed}: ask for fewer tokens or raise kv_bytes"
            )
            raise ContextLengthError(message, param="max_tokens")

    def initial(self, request: EngineRequest, tokens: int | None = None) -> int:
        """The slots that a request starts with, or resumes with when it has `tokens` tokens already."""
        return min((tokens or len(request.prompt)) + AHEAD, max_slots(request))

    def used(self, sequences: list[Sequence]) -> int:
        return sum(reserved(sequence) for sequence in sequences)

    def fits(self, slots: int, sequences: list[Sequence]) -> bool:
        """Whether `slots` more slots fit beside those that `sequences` have reserved."""
        return self.limit is None or self.used(sequences) + slots <= self.limit

    def grow(self, sequence: Sequence, sequences: list[Sequence]) -> bool:
        """Reserve the slots that `sequence`, one of `sequences`, may need in a step; False if they do not fit."""
        cache = sequence.kv_cache
        if not isinstance(cache, SequenceCache):
            return True
        least = min(cache.length + sequence.num_uncomputed + ROOM, max_slots(sequence.request))
        if least <= cache.capacity:
            return True
        more = min(max(least, int(cache.capacity * GROWTH)), max_slots(sequence.request))
        for capacity in (more, least):
            if self.fits(capacity - cache.capacity, sequences):
                cache.capacity = capacity
                return True
        return False


def max_slots(request: EngineRequest) -> int:
    """The most slots that a request can need, drafts included."""
    return len(request.prompt) + request.max_tokens + ROOM


def reserved(sequence: Sequence) -> int:
    cache = sequence.kv_cache
    return cache.capacity if isinstance(cache, SequenceCache) else 0


def default_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # frees memory that was in use only while the model was loaded
        return int(CUDA_SHARE * torch.cuda.mem_get_info(device)[0])
    return DEFAULT_BYTES
