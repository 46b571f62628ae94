"""Counts from which the predictor estimates: how often something that could happen did, and what follows what."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from agentspec.tools.prediction.observation import ANSWER

_DEPTH = 3  # events before a turn that a call's name may depend on


class RuleRates:
    """For each key the share of tries that hit, drawn towards a prior where there were few."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, list[int]] = {}

    def add(self, key: Hashable, hit: bool) -> None:
        seen = self._counts.setdefault(key, [0, 0])
        seen[0] += hit
        seen[1] += 1

    def correct(self, key: Hashable) -> None:
        """A try that was counted without a hit has hit after all."""
        self._counts.setdefault(key, [0, 1])[0] += 1

    def rate(self, key: Hashable, prior: float, weight: float) -> float:
        """The rate, where `prior` counts for `weight` tries."""
        hits, tries = self._counts.get(key, (0, 0))
        return (hits + weight * prior) / (tries + weight)


class NextNames:
    """Which tool's call, or which answer, follows the last events: an n-gram model that backs off to fewer events."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, ...], dict[str, int]] = {}

    def add(self, after: Sequence[str], name: str) -> None:
        for context in _contexts(after):
            counts = self._counts.setdefault(context, {})
            counts[name] = counts.get(name, 0) + 1

    def probabilities(self, after: Sequence[str]) -> dict[str, float]:
        """The probability of each name seen so far, and of an answer; the rest is for tools never called."""
        names = {**self._counts.get((), {}), ANSWER: 0}
        estimate = dict.fromkeys(names, 1.0 / (len(names) + 1))
        for context in _contexts(after):
            counts = self._counts.get(context)
            if counts is None:
                break
            weight = len(counts)
            total = sum(counts.values()) + weight
            estimate = {name: (counts.get(name, 0) + weight * estimate[name]) / total for name in names}
        return estimate


def _contexts(after: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The last 0, 1, … events."""
    for length in range(min(_DEPTH, len(after)) + 1):
        yield tuple(after[len(after) - length :])
