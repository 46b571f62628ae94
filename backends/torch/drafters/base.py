"""Who proposes tokens. A drafter may be wrong in any way: it costs time, never a token of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from agentspec.types import Draft

MIN_PROBABILITY = 0.02  # less likely nodes are not worth proposing


class Drafter(Protocol):
    """Proposes what may come next in one answer.

    `seconds_weighed` is the part of the last `propose` whose cost the drafter has itself weighed against its use.
    """

    seconds_weighed: float = 0.0

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        """A tree of at most `budget` tokens that may follow `context` (prompt and answer so far); None for nothing.

        Successive calls of one drafter see contexts that extend each other.
        """
        ...

    def close(self) -> None:
        """Free what is kept for this answer. Idempotent; nothing is proposed afterwards."""
        return None


def chain_draft(tokens: Sequence[int], confidence: float | Sequence[float], source: int) -> Draft:
    """A path whose every token is right with probability `confidence`, or its own, where the one before it was."""
    count = len(tokens)
    chances = np.cumprod(np.broadcast_to(np.asarray(confidence, dtype=np.float64), (count,)))
    return make_draft(tokens, range(-1, count - 1), chances, [0] * count, [source] * count)


def make_draft(
    tokens: Sequence[float],
    parents: Sequence[float],
    probabilities: Sequence[float] | np.ndarray,
    match_length: Sequence[float],
    source: Sequence[float],
) -> Draft:
    return Draft(
        tokens=np.asarray(tokens, dtype=np.int32),
        parents=np.asarray(parents, dtype=np.int32),
        probabilities=np.asarray(probabilities, dtype=np.float32),
        match_length=np.asarray(match_length, dtype=np.int32),
        source=np.asarray(source, dtype=np.uint8),
    )
