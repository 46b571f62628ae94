"""Memory for the key/value rows of all active answers: who may begin, who may grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agentspec.backends.torch.engine.sequence import EngineRequest, Generation
from agentspec.backends.torch.model.kv_cache import GROWTH, SequenceCache
from agentspec.backends.torch.model.target import TargetModel
from agentspec.errors import ContextLengthError

ROOM = 64  # rows reserved beyond prompt and answer for drafts
AHEAD = 8 * ROOM  # rows that an answer begins with beyond its prompt
DEFAULT_BYTES = 4 << 30
CUDA_SHARE = 0.8  # of the memory that is free once the model is loaded


@dataclass(frozen=True, slots=True)
class KVBudget:
    """At most `limit` rows in all; None where rows cannot be counted. `row_bytes` is the size of one."""

    limit: int | None
    row_bytes: int = 0

    @classmethod
    def of(cls, target: TargetModel, wanted_bytes: int | None) -> KVBudget:
        row_bytes = target.row_bytes()
        if not row_bytes:
            return cls(None)
        return cls((default_bytes(target.device) if wanted_bytes is None else wanted_bytes) // row_bytes, row_bytes)

    def check(self, job: EngineRequest) -> None:
        """Raise `ContextLengthError` for a job that could not be finished even alone."""
        rows = most_rows(job)
        if self.limit is not None and rows > self.limit:
            message = (
                f"{len(job.prompt)} prompt tokens and {job.max_tokens} more need {rows * self.row_bytes >> 20} MiB of"
                f" key/value memory, and kv_bytes allows {self.limit * self.row_bytes >> 20}: ask for fewer tokens or"
                " raise kv_bytes"
            )
            raise ContextLengthError(message, param="max_tokens")

    def first(self, job: EngineRequest, tokens: int | None = None) -> int:
        """The rows that a job begins with, or goes on with from `tokens` tokens."""
        return min((tokens or len(job.prompt)) + AHEAD, most_rows(job))

    def used(self, generations: Sequence[Generation]) -> int:
        return sum(held(generation) for generation in generations)

    def fits(self, rows: int, generations: Sequence[Generation]) -> bool:
        """Whether a job that begins with `rows` rows may come to these."""
        return self.limit is None or self.used(generations) + rows <= self.limit

    def grow(self, generation: Generation, generations: Sequence[Generation]) -> bool:
        """Make room for whatever `generation`, one of these, may add in a step; False where it does not fit."""
        rows = generation.rows
        if not isinstance(rows, SequenceCache):
            return True
        least = min(rows.length + generation.unread + ROOM, most_rows(generation.job))
        if least <= rows.capacity:
            return True
        more = min(max(least, int(rows.capacity * GROWTH)), most_rows(generation.job))
        for capacity in (more, least):
            if self.fits(capacity - rows.capacity, generations):
                rows.capacity = capacity
                return True
        return False


def most_rows(job: EngineRequest) -> int:
    """The rows that a job has at most, drafts included."""
    return len(job.prompt) + job.max_tokens + ROOM


def held(generation: Generation) -> int:
    rows = generation.rows
    return rows.capacity if isinstance(rows, SequenceCache) else 0


def default_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what only was in use while the model was loaded
        return int(CUDA_SHARE * torch.cuda.mem_get_info(device)[0])
    return DEFAULT_BYTES
