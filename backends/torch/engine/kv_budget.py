"""What each engine of this process may take of its device's memory for KV slots, and how it divides that among the
answers that run, other work and idle slots.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from agentspec.backends.torch.engine.sequence import EngineRequest, Sequence
from agentspec.backends.torch.model.target import TargetModel
from agentspec.errors import ConfigurationError, ContextLengthError, OverloadedError

logger = logging.getLogger(__name__)

ROOM = 64  # slots reserved beyond prompt and answer, at least; as many as may be drafted in a step
CPU = torch.device("cpu")
LEAST = 512  # slots that an engine needs to be of use
DEFAULT_BYTES = 4 << 30  # on a CPU, if that is no more than a half of the free memory
CPU_SHARE = 0.5  # share of the memory that is free once the model is loaded
SHARE = 0.8  # on accelerators


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


_PROMISED: weakref.WeakSet[KVBudget] = weakref.WeakSet()  # of the engines of this process that are not closed
_LOCK = threading.RLock()


def budget_of(target: TargetModel, wanted_bytes: int | None, *, draft_bytes: int = 0, room: int = ROOM) -> KVBudget:
    """The budget of an engine: `wanted_bytes`, or a share of the device's memory if None, of which no two engines are
    promised the same part. `draft_bytes` are what a draft model keeps for each slot. The promise ends with the budget,
    or by `release`. Raises `ConfigurationError` if the device has no memory left.
    """
    device = target.device
    budget = KVBudget(0, target.slot_bytes() + draft_bytes, max(room, ROOM), device=device)
    if wanted_bytes is None and device.type == "cuda":
        torch.cuda.empty_cache()  # what was in use only while the model was loaded
    with _LOCK:
        free = available(device)
        if wanted_bytes is not None:
            budget.promised = wanted_bytes
            if free is not None and wanted_bytes > free:
                text = "kv_bytes promises %d MiB of %s, of which %d MiB are free and not promised to another engine"
                logger.warning(text, wanted_bytes >> 20, device, free >> 20)
        elif free is None:
            budget.promised = DEFAULT_BYTES
        else:
            budget.promised = min(int(CPU_SHARE * free), DEFAULT_BYTES) if device.type == "cpu" else int(SHARE * free)
        budget.limit = budget.promised // budget.slot_bytes
        if wanted_bytes is None and budget.limit < LEAST:
            message = f"{device} has no memory left for key/value slots: set kv_bytes, here or for others"
            raise ConfigurationError(message, param="kv_bytes")
        _PROMISED.add(budget)
    return budget


def available(device: torch.device) -> int | None:
    """Free bytes of the device that are not promised to another engine; None if they cannot be measured."""
    free = free_memory(device)
    owed = sum(max(0, one.promised - one.allocated()) for one in _PROMISED if one.device == device)
    return None if free is None else max(0, free - owed)


def release(budget: KVBudget) -> None:
    """End a promise. Idempotent."""
    with _LOCK:
        _PROMISED.discard(budget)


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated on the device; None where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines() if device.type == "cpu" else []
    except OSError:  # another system than Linux
        return None
    found = next((line.split() for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else int(found[1]) << 10
