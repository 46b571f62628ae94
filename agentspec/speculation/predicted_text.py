"""Follows an answer along the text that its client predicted, and finds the place again after a divergence."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

ALIGN_LENGTHS = (8, 6, 4, 3, 2)  # numbers of tokens that must match to find the place in the prediction again
START_CONFIDENCE = 0.8


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
        self._last: deque[int] = deque(maxlen=ALIGN_LENGTHS[0])
        self._places: dict[tuple[int, ...], list[int]] | None = None  # only once they are needed: it takes a while

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
        if self._places is None:
            self._places = _places(self.tokens)
        last = tuple(self._last)
        for length in ALIGN_LENGTHS:
            places = self._places.get(last[-length:]) if length <= len(last) else None
            if places:
                return places[min(bisect_left(places, self._reached), len(places) - 1)]
        return None


def _places(tokens: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
    """For every run of tokens of an alignment length, the positions right after its occurrences, ascending."""
    places: dict[tuple[int, ...], list[int]] = {}
    for length in ALIGN_LENGTHS:
        for end in range(length, len(tokens)):
            places.setdefault(tuple(tokens[end - length : end]), []).append(end)
    return places
