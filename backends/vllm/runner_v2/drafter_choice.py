"""Learns for each request which of two drafters gains more: passages, by how many tokens they match, or a model."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentspec.backends.vllm.runner_v2.matching import DEPTH

NEVER = DEPTH + 1
"""A match length that no match has."""
PRIOR = 6.0  # tokens that an assumption counts for
MODEL_RATE = 0.7  # assumed share of a model's drafted tokens that are right
FADE = 0.998  # decay per step of what was learned over all requests
REQUEST_FADE = 0.9  # of what was learned of one: predictability changes within a text


@dataclass(slots=True)
class HitRate:
    """How often a drafter's next token was right, as decaying counts; what followed a wrong token does not count."""

    hits: float = 0.0
    tries: float = 0.0

    def observe(self, right: int, known: int, fade: float) -> None:
        """The first `right` tokens of a draft were, of which `known` could be compared with the output."""
        self.hits = self.hits * fade + right
        self.tries = self.tries * fade + right + (right < known)

    def rate(self, assumed: float) -> float:
        return (self.hits + PRIOR * assumed) / (self.tries + PRIOR)


@dataclass(slots=True)
class RequestChoice:
    """One request's record."""

    ours: HitRate = field(default_factory=HitRate)
    expected: float = 0.0  # hits of ours, by the rates over all requests
    model: HitRate = field(default_factory=HitRate)


class DrafterChoice:
    """What both drafters are expected to gain with drafts of `drafted` tokens. One thread calls its methods.

    Both are judged in each step by the tokens that the step confirmed, whichever of them was verified.
    """

    def __init__(self, drafted: int) -> None:
        self._drafted = drafted
        self._ours = [HitRate() for _ in range(DEPTH + 1)]  # by match length
        self._model = HitRate()

    def observe(self, request: RequestChoice, match: int, ours: int, model: int, known: int) -> None:
        """`known` tokens were confirmed, of which the first `ours` and `model` were drafted after a `match`."""
        known = min(known, self._drafted)
        model, ours = min(model, known), min(ours, known)
        self._model.observe(model, known, FADE)
        request.model.observe(model, known, REQUEST_FADE)
        if match == 0:
            return
        tries = ours + (ours < known)
        request.expected = request.expected * REQUEST_FADE + tries * self._rate(match)
        self._ours[match].observe(ours, known, FADE)
        request.ours.observe(ours, known, REQUEST_FADE)

    def least_match(self, request: RequestChoice) -> int:
        """The match length from which on passages are expected to gain more tokens than the model; else `NEVER`."""
        model = request.model.rate(self._model.rate(MODEL_RATE))
        factor = min(1.0, (request.ours.hits + PRIOR / 2) / (request.expected + PRIOR / 2))
        least = NEVER
        while least > 1 and factor * self._rate(least - 1) > model:
            least -= 1
        return least

    def _rate(self, match: int) -> float:
        """How often the next token after a match of that length is right."""
        return self._ours[match].rate(match / (match + 1.0))
