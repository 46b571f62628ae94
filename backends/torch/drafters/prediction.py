"""Drafts from the answer that the client predicts (`prediction`), and realigns with it after every divergence."""

from __future__ import annotations

from collections.abc import Sequence

from agentspec.backends.torch.drafters.base import Drafter, chain_draft
from agentspec.types import Draft, Source

ALIGN_LENGTHS = (8, 6, 4, 3, 2)  # numbers of tokens that must match to find the place in the prediction again
START_CONFIDENCE = 0.8


class PredictionDrafter(Drafter):
    """Drafts from the answer that the client predicts, for as long as the real answer follows it.

    Before any output it proposes the prediction's beginning. After a divergence it looks up the answer's last tokens
    in the prediction, the longest match first, and takes the nearest place ahead of where it was. Its confidence in
    the next token is the running rate of correct predictions.
    """

    def __init__(self, prediction: Sequence[int], prompt_length: int) -> None:
        self.prediction = list(prediction)
        self.accepted = 0
        self._at: int | None = 0
        self._reached = 0
        self._seen = prompt_length
        self._prompt_length = prompt_length
        self._confidence = START_CONFIDENCE
        self._places = _places(self.prediction)

    @property
    def rejected(self) -> int:
        """The number of tokens of the prediction that did not appear in the answer."""
        return max(0, len(self.prediction) - self.accepted)

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        self.follow(context)
        if self._at is None or self._at >= len(self.prediction):
            return None
        tokens = self.prediction[self._at : self._at + budget]
        return chain_draft(tokens, self._confidence, Source.PREDICTION)

    def follow(self, context: Sequence[int]) -> None:
        """Follow the tokens committed since the last call and count those that were predicted."""
        for end in range(self._seen, len(context)):
            self._step(context, end)
        self._seen = len(context)

    def _step(self, context: Sequence[int], end: int) -> None:
        at = self._at
        if at is not None and at < len(self.prediction):
            hit = self.prediction[at] == context[end]
            self._confidence += 0.1 * (hit - self._confidence)
            if hit:
                self.accepted += 1
                self._at = self._reached = at + 1
                return
        self._at = self._aligned(context, end + 1)

    def _aligned(self, context: Sequence[int], end: int) -> int | None:
        for length in ALIGN_LENGTHS:
            start = end - length
            places = self._places.get(tuple(context[start:end])) if start >= self._prompt_length else None
            if places:
                return next((place for place in places if place >= self._reached), places[-1])
        return None


def _places(prediction: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
    """For every run of tokens of an alignment length, the positions right after its occurrences, ascending."""
    places: dict[tuple[int, ...], list[int]] = {}
    for length in ALIGN_LENGTHS:
        for end in range(length, len(prediction)):
            places.setdefault(tuple(prediction[end - length : end]), []).append(end)
    return places
