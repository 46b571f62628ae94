"""The memory of all KV slots: how much a process may promise on a device, and how one engine divides its part."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from agentspec.backends.torch.engine.sequence import EngineRequest, Sequence
from agentspec.backends.torch.model.device import free_memory
from agentspec.backends.torch.model.kv_cache import GROWTH
from agentspec.backends.torch.model.target import TargetModel
from agentspec.errors import ConfigurationError, ContextLengthError, OverloadedError

logger = logging.getLogger(__name__)

ROOM = 64  # slots reserved beyond prompt and answer, at least; as many as may be drafted in a step
AHEAD = 512  # slots that a sequence starts with, beyond its prompt
DEFAULT_BYTES = 4 << 30  # on a CPU, if that is no more than a half of the free memory
SHARES = {"cpu": 0.5}  # share of the memory that is free once the model is loaded
SHARE = 0.8  # on accelerators
CPU = torch.device("cpu")


@dataclass(slots=True, eq=False, weakref_slot=True)
class KVBudget:
    """A limit of `limit` KV slots in all. A slot has `slot_bytes`, with those of the draft model, and each answer needs
    `room` slots for drafts.

    Running answers and loans take what they need. Idle slots, kept for later requests, use the rest (`idle_bytes`).
    `allocated` tells how many bytes are in use, `lent` how many slots are lent, and `promised` how many bytes of
    `device` are the budget's own.
    """

    limit: int
    slot_bytes: int = 0
    room: int = ROOM
    allocated: Callable[[], int] = lambda: 0
    lent: int = 0
    device: torch.device = CPU
    promised: int = 0
    # The garbage collector may give back what is lent, in a thread that is lending.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @classmethod
    def of(
        cls,
        target: TargetModel,
        wanted_bytes: int | None,
        *,
        draft_bytes: int = 0,
        room: int = ROOM,
    ) -> KVBudget:
        """The budget of an engine: `wanted_bytes`, or a share of the device's memory if None. `draft_bytes` are what a
        draft model keeps for each slot. Raises `ConfigurationError` if the device has no memory left.
        """
        budget = cls(0, target.slot_bytes() + draft_bytes, max(room, ROOM), device=target.device)
        if wanted_bytes is None and target.device.type == "cuda":
            torch.cuda.empty_cache()  # what was in use only while the model was loaded
        budget.limit = promise(budget, wanted_bytes) // budget.slot_bytes
        if wanted_bytes is None and budget.limit < AHEAD:
            release(budget)
            message = f"{target.device} has no memory left for key/value slots: set kv_bytes, here or for others"
            raise ConfigurationError(message, param="kv_bytes")
        return budget

    def check(self, request: EngineRequest) -> None:
        """Raise `ContextLengthError` for a request that would not fit even if it were alone."""
        slots = self.most(request)
        if slots > self.limit:
            needed, allowed = slots * self.slot_bytes >> 20, self.limit * self.slot_bytes >> 20
            message = (
                f"{len(request.prompt)} prompt tokens and {request.max_tokens} more need {needed} MiB of key/value"
                f" memory, and kv_bytes allows {allowed}: ask for fewer tokens or raise kv_bytes"
            )
            raise ContextLengthError(message, param="max_tokens")

    def most(self, request: EngineRequest) -> int:
        """The most slots that a request can need, drafts included."""
        return len(request.prompt) + request.max_tokens + self.room

    def initial(self, request: EngineRequest, tokens: int | None = None) -> int:
        """The slots that a request starts with, or resumes with when it has `tokens` tokens already."""
        return min((tokens or len(request.prompt)) + max(AHEAD, self.room), self.most(request))

    def used(self, sequences: list[Sequence]) -> int:
        return self.lent + sum(sequence.kv_cache.capacity for sequence in sequences)

    def fits(self, slots: int, sequences: list[Sequence]) -> bool:
        """Whether `slots` more slots fit beside those that `sequences` have reserved."""
        return self.used(sequences) + slots <= self.limit

    def idle_bytes(self, sequences: list[Sequence]) -> int:
        """The bytes that idle slots may take beside the slots that `sequences` have reserved."""
        return max(0, self.limit - self.used(sequences)) * self.slot_bytes

    def lend(self, slots: int, sequences: list[Sequence]) -> Callable[[], None]:
        """Set `slots` slots aside for work outside the answers; the function returned gives them back, from any thread.

        Raises `OverloadedError` while running answers need them, `ContextLengthError` for more than there are.
        """
        if slots > self.limit:
            raise ContextLengthError(f"{slots} tokens need more key/value memory than kv_bytes allows")
        with self._lock:
            if not self.fits(slots, sequences):
                raise OverloadedError("running answers need the key/value memory")
            self.lent += slots
        given = threading.Lock()

        def give_back() -> None:
            if given.acquire(blocking=False):
                with self._lock:
                    self.lent -= slots

        return give_back

    def grow(self, sequence: Sequence, sequences: list[Sequence]) -> bool:
        """Reserve the slots that `sequence`, one of `sequences`, may need in a step; False if they do not fit."""
        cache, most = sequence.kv_cache, self.most(sequence.request)
        least = min(cache.length + sequence.num_uncomputed + self.room, most)
        if least <= cache.capacity:
            return True
        more = min(max(least, int(cache.capacity * GROWTH)), most)
        for capacity in (more, least):
            if self.fits(capacity - cache.capacity, sequences):
                cache.capacity = capacity
                return True
        return False


_PROMISED: weakref.WeakSet[KVBudget] = weakref.WeakSet()  # of the engines of this process that are not closed
_LOCK = threading.RLock()


def promise(budget: KVBudget, wanted: int | None) -> int:
    """Promise `budget` the `wanted` bytes of its device or, if None, its share of what is available, so that no two
    engines are promised the same memory; returns the bytes. The promise ends with the budget, or by `release`.
    """
    with _LOCK:
        device, free = budget.device, available(budget.device)
        if wanted is None:
            share = DEFAULT_BYTES if free is None else int(SHARES.get(device.type, SHARE) * free)
            budget.promised = min(share, DEFAULT_BYTES) if device.type == "cpu" else share
        else:
            budget.promised = wanted
            if free is not None and wanted > free:
                text = "kv_bytes promises %d MiB of %s, of which %d MiB are free and not promised to another engine"
                logger.warning(text, wanted >> 20, device, free >> 20)
        _PROMISED.add(budget)
        return budget.promised


def available(device: torch.device) -> int | None:
    """Free bytes of the device that are not promised to anybody; None if they cannot be measured."""
    with _LOCK:
        others = [other for other in _PROMISED if other.device == device]
        owed = sum(max(0, other.promised - other.allocated()) for other in others)
        free = free_memory(device)
        return None if free is None else max(0, free - owed)


def release(budget: KVBudget) -> None:
    """End a promise. Idempotent."""
    with _LOCK:
        _PROMISED.discard(budget)
