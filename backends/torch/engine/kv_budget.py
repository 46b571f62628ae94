"""How an engine divides its memory for KV slots among the answers that run, other work and idle slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from agentspec.backends.torch.engine.sequence import EngineRequest, Sequence
from agentspec.errors import ContextLengthError, OverloadedError

ROOM = 64  # slots reserved beyond prompt and answer, at least; as many as may be drafted in a step
CPU = torch.device("cpu")


@dataclass(slots=True, eq=False, weakref_slot=True)
class KVBudget:
    """A limit of `limit` KV slots in all. A slot has `slot_bytes`, with those of the draft model, and each answer needs
    `room` slots for drafts.

    An answer reserves every slot that it may need before it begins. Loans take slots for other work. Idle slots, stored
    for later requests, use the rest (`idle_bytes`). `allocated` reports how many bytes are in use, and `promised` is
    how many bytes of `device` are the budget's own.
    """

    limit: int
    slot_bytes: int = 0
    room: int = ROOM
    allocated: Callable[[], int] = lambda: 0
    device: torch.device = CPU
    promised: int = 0
    _loans: dict[object, int] = field(default_factory=dict)

    def check(self, request: EngineRequest) -> None:
        """Raise `ContextLengthError` for a request that would not fit even if it were alone."""
        slots = self.needed(request)
        if slots > self.limit:
            needed, allowed = slots * self.slot_bytes >> 20, self.limit * self.slot_bytes >> 20
            message = (
                f"{len(request.prompt)} prompt tokens and {request.max_tokens} more need {needed} MiB of key/value"
                f" memory, and kv_bytes allows {allowed}: ask for fewer tokens or raise kv_bytes"
            )
            raise ContextLengthError(message, param="max_tokens")

    def needed(self, request: EngineRequest) -> int:
        """The most slots that a request can need, drafts included."""
        return len(request.prompt) + request.max_tokens + self.room

    @property
    def lent(self) -> int:
        return sum(tuple(self._loans.values()))

    def used(self, sequences: list[Sequence]) -> int:
        return self.lent + sum(sequence.kv_cache.capacity for sequence in sequences)

    def fits(self, slots: int, sequences: list[Sequence]) -> bool:
        """Whether `slots` more slots fit next to those that `sequences` have reserved."""
        return self.used(sequences) + slots <= self.limit

    def idle_bytes(self, sequences: list[Sequence]) -> int:
        """The bytes that idle slots may take next to the slots that `sequences` have reserved."""
        return max(0, self.limit - self.used(sequences)) * self.slot_bytes

    def lend(self, slots: int, sequences: list[Sequence]) -> Callable[[], None]:
        """Set `slots` slots aside for work outside the answers. The function returned gives them back; any thread may
        call it, the garbage collector in any line, and more than once.

        Raises `OverloadedError` while running answers need them, `ContextLengthError` for more than there are.
        """
        if slots > self.limit:
            raise ContextLengthError(f"{slots} tokens need more key/value memory than kv_bytes allows")
        if not self.fits(slots, sequences):
            raise OverloadedError("running requests use the key/value memory")
        loan = object()
        self._loans[loan] = slots

        def give_back() -> None:
            self._loans.pop(loan, None)

        return give_back
