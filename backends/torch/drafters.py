"""Who proposes tokens. A drafter may be wrong in any way: it costs time, never a token of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from agentspec.types import Draft, Source

MIN_PROBABILITY = 0.02
ALIGN_LENGTHS = (8, 6, 4, 3, 2)  # tokens that must agree to find the place in a prediction again
START_CONFIDENCE = 0.8


class Drafter(Protocol):
    """Proposes what may come next."""

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        """A tree of at most `budget` tokens that may follow `context` (prompt and answer so far); None for nothing.

        Successive calls of one drafter see contexts that extend each other.
        """
        ...


class DraftingRequest(Protocol):
    """The open cache request that a `SuffixDrafter` drafts from."""

    def draft(self, max_tokens: int = 32, min_probability: float = 0.0) -> Draft | None: ...


class SuffixDrafter:
    """Drafts from the token cache; the request already knows the context."""

    def __init__(self, request: DraftingRequest) -> None:
        self._request = request

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        return self._request.draft(budget, MIN_PROBABILITY)


class PredictionDrafter:
    """Drafts from the answer a client expects, following it as far as the answer does and finding it again after.

    Before any output it proposes the prediction's beginning. After a divergence it looks for the answer's last tokens
    in the prediction, longest match first and nearest ahead of where it was. Its confidence in the next token is a
    running rate of how often the place it stood at was right.
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
        """Tokens of the prediction that did not appear in the answer."""
        return max(0, len(self.prediction) - self.accepted)

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        self.follow(context)
        if self._at is None or self._at >= len(self.prediction):
            return None
        tokens = self.prediction[self._at : self._at + budget]
        return chain_draft(tokens, self._confidence, Source.PREDICTION)

    def follow(self, context: Sequence[int]) -> None:
        """Move along with the tokens committed since the last call, counting those that were predicted."""
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
    """For every run of tokens of an alignment length, the places right behind it, ascending."""
    places: dict[tuple[int, ...], list[int]] = {}
    for length in ALIGN_LENGTHS:
        for end in range(length, len(prediction)):
            places.setdefault(tuple(prediction[end - length : end]), []).append(end)
    return places


class MergedDrafter:
    """Several drafters' trees laid over each other: equal paths become one, with the higher probability."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        drafts = [draft for drafter in self._drafters if (draft := drafter.propose(context, budget)) is not None]
        drafts = [draft for draft in drafts if len(draft)]
        return merge(drafts) if len(drafts) > 1 else next(iter(drafts), None)


def merge(drafts: Sequence[Draft]) -> Draft:
    """One tree holding every path of `drafts`; a node found in several keeps the most probable one's numbers."""
    nodes: dict[tuple[int, int], int] = {}
    rows: list[list[float]] = []
    for draft in drafts:
        place: list[int] = []
        for i in range(len(draft)):
            parent = int(draft.parents[i])
            above = place[parent] if parent >= 0 else -1
            token, probability = int(draft.tokens[i]), float(draft.probabilities[i])
            node = nodes.setdefault((above, token), len(nodes))
            place.append(node)
            row = [token, above, probability, int(draft.match_length[i]), int(draft.source[i])]
            if node == len(rows):
                rows.append(row)
            elif probability > rows[node][2]:
                rows[node] = row
    columns = list(zip(*rows, strict=True))
    return make_draft(columns[0], columns[1], columns[2], columns[3], columns[4])


def chain_draft(tokens: Sequence[int], confidence: float, source: int) -> Draft:
    """A path whose every token is right with probability `confidence` where the one before it was."""
    count = len(tokens)
    return make_draft(
        tokens, range(-1, count - 1), confidence ** np.arange(1, count + 1), [0] * count, [source] * count
    )


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
