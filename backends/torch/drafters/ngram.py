"""Drafts from the request's own text: copies what followed the last occurrence of its end (prompt lookup decoding)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentspec.backends.torch.drafters.base import MIN_PROBABILITY, Drafter, chain_draft
from agentspec.types import Draft, Source

LONGEST_MATCH = 16  # tokens; longer matches are treated alike
SHORTEST_MATCH = 2
RATE = 0.1  # how fast the confidence of a match length follows the observed hits


class NgramDrafter(Drafter):
    """Finds the longest earlier match of the context's end, the latest of several, and copies the tokens after it.

    A copy that reaches the end of the text starts over with the tokens it copied, which continues a repetition. A
    token's confidence is the running hit rate for the length of the match that it would extend.
    """

    def __init__(self) -> None:
        self._text = np.empty(1024, dtype=np.int32)
        self._length = 0
        self._proposed: tuple[int, list[int]] = (0, [])  # match length, and the tokens that were proposed
        self._rates = [length / (length + 2) for length in range(LONGEST_MATCH + 1)]

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        fresh = context[self._length :]
        self._learn(fresh)
        self._append(fresh)
        matched, end = longest_match(self._text[: self._length])
        if matched < SHORTEST_MATCH or budget <= 0:
            return None
        tokens = self._copy(end, budget)
        rates = [self._rates[min(matched + i, LONGEST_MATCH)] for i in range(len(tokens))]
        kept = max(1, int((np.cumprod(rates) >= MIN_PROBABILITY).sum()))
        self._proposed = matched, tokens[:kept]
        return chain_draft(tokens[:kept], rates[:kept], Source.NGRAM)

    def _copy(self, end: int, count: int) -> list[int]:
        behind: list[int] = self._text[end : self._length].tolist()
        return (behind * (1 + count // len(behind)))[:count]

    def _append(self, fresh: Sequence[int]) -> None:
        end = self._length + len(fresh)
        if end > len(self._text):
            self._text = np.resize(self._text, 2 * end)
        self._text[self._length : end] = fresh
        self._length = end

    def _learn(self, fresh: Sequence[int]) -> None:
        """Update the hit rates by the last proposal's tokens, up to its first miss."""
        matched, tokens = self._proposed
        for i, (token, real) in enumerate(zip(tokens, fresh, strict=False)):
            length = min(matched + i, LONGEST_MATCH)
            self._rates[length] += RATE * ((token == real) - self._rates[length])
            if token != real:
                break
        self._proposed = 0, []


def longest_match(text: NDArray[np.int32]) -> tuple[int, int]:
    """How many tokens at the end of `text` also occur earlier (at most `LONGEST_MATCH`), and where the latest such
    occurrence ends; (0, 0) for none.
    """
    ends, matched = np.arange(1, len(text)), 0
    while len(ends) and matched < LONGEST_MATCH:
        longer = ends[ends > matched]
        longer = longer[text[longer - 1 - matched] == text[-1 - matched]]
        if not len(longer):
            break
        ends, matched = longer, matched + 1
    return (matched, int(ends[-1])) if matched else (0, 0)
