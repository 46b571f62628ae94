"""The drafter interface. A drafter may propose wrong tokens: that costs time, but never changes the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from agentspec.types import Draft


class Drafter:
    """Proposes the next tokens of one answer.

    `seconds_weighed` is how much of the last `propose` call's time the drafter has already charged against its gain.
    """

    seconds_weighed: float = 0.0

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        """A tree of at most `budget` tokens that may follow `context` (prompt and answer so far); None for no draft.

        The context of each call extends that of the call before.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Free the memory of this answer. Idempotent; `propose` is not called afterwards."""
        return None


class SuffixDrafter(Drafter):
    """Asks the token cache: `draft` of the open cache session, which already knows the context.

    `least(len(context))` is the least probability with which a token pays.
    """

    def __init__(self, draft: Callable[[int, float], Draft | None], least: Callable[[int], float]) -> None:
        self._draft, self._least = draft, least

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        return self._draft(budget, self._least(len(context)))


def chain_draft(tokens: Sequence[int], confidence: float | Sequence[float], source: int) -> Draft:
    """A draft of one path. `confidence`, a single value or one per token, is the probability that a token is right
    given that all tokens before it are.
    """
    chances = np.cumprod(np.broadcast_to(np.asarray(confidence, dtype=np.float64), (len(tokens),)))
    return path_draft(tokens, chances, source)


def path_draft(tokens: Sequence[int], chances: Sequence[float] | np.ndarray, source: int) -> Draft:
    """A draft of one path, with the probability of the path up to each token."""
    count = len(tokens)
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
