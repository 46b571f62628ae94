"""Where an answer stands in the text that was predicted for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

ALIGN_LENGTHS = (2, 3, 4, 6, 8)  # numbers of tokens that must match to find the place in the prediction again
START_CONFIDENCE = 0.8
TOKEN_CHARACTERS = 16  # of a predicted text that are read for each token that the answer may have


class PredictedText:
    """Where an answer stands in its prediction, both as token ids.

    Before any output it stands at the beginning. After a divergence the answer's last tokens are looked up in the
    prediction, the longest match first, and the nearest place ahead of where it was is taken. `confidence` in the next
    token is the running rate of correct predictions.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.accepted = 0
        self.confidence = START_CONFIDENCE
        self._at: int | None = 0
        self._reached = 0
        self._last: deque[int] = deque(maxlen=max(ALIGN_LENGTHS))
        self._ids = np.asarray(tokens, dtype=np.int64)

    @property
    def rejected(self) -> int:
        """The number of predicted tokens that did not appear in the answer."""
        return max(0, len(self.tokens) - self.accepted)

    def ahead(self, count: int) -> list[int]:
        """At most `count` predicted tokens that follow the answer; empty if its place is not known."""
        return [] if self._at is None else self.tokens[self._at : self._at + count]

    def follow(self, fresh: Iterable[int]) -> None:
        """Follow further tokens of the answer, and count those that were predicted."""
        for token in fresh:
            self._last.append(token)
            self._step(token)

    def _step(self, token: int) -> None:
        at = self._at
        if at is not None and at < len(self.tokens):
            hit = self.tokens[at] == token
            self.confidence += 0.1 * (hit - self.confidence)
            if hit:
                self.accepted += 1
                self._at = self._reached = at + 1
                return
        self._at = self._aligned()

    def _aligned(self) -> int | None:
        """The position after the best match of the answer's last tokens. Costs a pass over the prediction."""
        found = None
        ends = np.arange(1, max(1, len(self._ids)))
        for length, token in enumerate(reversed(self._last), start=1):
            ends = ends[ends >= length]
            ends = ends[self._ids[ends - length] == token]
            if not len(ends):
                break
            if length in ALIGN_LENGTHS:
                found = ends
        return None if found is None else int(found[min(np.searchsorted(found, self._reached), len(found) - 1)])
