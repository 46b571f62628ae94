"""How one engine divides its memory for KV slots among running answers, loans and idle slots."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from agentspec.backends.torch.engine.sequence import EngineRequest, Sequence
from agentspec.backends.torch.model.kv_cache import GROWTH
from agentspec.errors import ContextLengthError, OverloadedError

ROOM = 64  # slots reserved beyond prompt and answer, at least; as many as may be drafted in a step
AHEAD = 512  # slots that a sequence starts with, beyond its prompt
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
