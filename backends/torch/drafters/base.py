"""The drafter protocol. A drafter may propose wrong tokens: that costs time, but never changes the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from agentspec.backends.torch.drafters.forwards import Drafting
from agentspec.types import Draft

MIN_PROBABILITY = 0.02  # nodes less likely than this are not proposed
LIKELY = 0.5  # chance of a token from which on a draft model that reads it in advance saves more than a wrong one costs

Guess = Callable[[Sequence[int], int], Sequence[int]]
"""At most so many tokens that are likely to follow the context and these tokens."""


class Drafter(Protocol):
    """Proposes the next tokens of one answer.

    `seconds_weighed` is how much of the last `propose` call's time the drafter has already charged against its gain.
    """

    seconds_weighed: float = 0.0

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        """A tree of at most `budget` tokens that may follow `context` (prompt and answer so far); None for no draft.

        The context of each call extends that of the call before.
        """
        ...

    def drafting(self, context: Sequence[int], budget: int) -> Drafting[Draft | None]:
        """`propose` as a generator: a drafter with a model yields the forwards that it needs, which are computed with
        those of other answers.
        """
        return self.propose(context, budget)
        yield  # makes this a generator

    def ahead(self, path: Sequence[int], budget: int) -> Sequence[int]:
        """At most `budget` tokens that follow the context of the last `propose` and then `path`, each at least with the
        chance `LIKELY`. Nothing is learned from `path`, which may never come.
        """
        return ()

    def rest(self) -> None:
        """Free memory that can be filled again from the context of the next `propose`."""
        return None

    def close(self) -> None:
        """Free everything kept for this answer. Idempotent; `propose` is not called afterwards."""
        return None


def no_guess(path: Sequence[int], budget: int) -> Sequence[int]:
    return ()


class StagedDrafter(Drafter, Protocol):
    """A drafter for which another one drafts, as it does for the target (staged speculation, Spector and Re 2023)."""

    def drafting(self, context: Sequence[int], budget: int, guess: Guess = no_guess) -> Drafting[Draft | None]: ...


def chain_draft(tokens: Sequence[int], confidence: float | Sequence[float], source: int) -> Draft:
    """A draft of one path. `confidence`, a single value or one per token, is the probability that a token is right
    given that all tokens before it are.
    """
    count = len(tokens)
    chances = np.cumprod(np.broadcast_to(np.asarray(confidence, dtype=np.float64), (count,)))
    return make_draft(tokens, range(-1, count - 1), chances, [0] * count, [source] * count)


def likeliest_path(draft: Draft, least: float) -> list[int]:
    """The tokens of the path that follows the likeliest child from the root, as far as it has a chance of `least`."""
    path: list[int] = []
    node = -1
    while True:
        children = np.flatnonzero((draft.parents == node) & (draft.probabilities >= least))
        if not len(children):
            return path
        node = int(children[draft.probabilities[children].argmax()])
        path.append(int(draft.tokens[node]))


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
