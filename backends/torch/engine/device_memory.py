"""What each engine of this process may take of its device's memory for KV slots."""

from __future__ import annotations

import logging
import threading
import weakref
from pathlib import Path

import torch

from agentspec.backends.torch.engine.kv_budget import ROOM, KVBudget
from agentspec.backends.torch.model.target import TargetModel
from agentspec.errors import ConfigurationError

logger = logging.getLogger(__name__)

LEAST = 512  # slots that an engine needs to be of use
DEFAULT_BYTES = 4 << 30  # on a CPU, if that is no more than a half of the free memory
CPU_SHARE = 0.5  # share of the memory that is free once the model is loaded
SHARE = 0.8  # on accelerators

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
