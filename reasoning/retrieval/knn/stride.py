"""How many queries to gather before the datastore is searched: RaLMSpec's optimal stride, for what was measured."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from agentspec.speculation.stride import RunningMean, os3

WINDOW: Final = 8  # searches that the hit rate is estimated from


@dataclass(slots=True)
class KnnStride:
    """OS3 (Zhang et al. 2024, section 4), verification waited for: the stride with the most verified queries a second.

    A search takes hardly longer for more queries, and the wrong guess of a batch costs nothing more: its token is drawn
    from what the search found. A stride of 1 is therefore sequential retrieval. `fixed` does not adapt.
    """

    fixed: int | None = None
    _guess: RunningMean = field(default_factory=RunningMean)
    _search: RunningMean = field(default_factory=RunningMean)
    _seen: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def gamma(self) -> float:
        """Share of right guesses, of which one right and one wrong are taken for granted."""
        return (1 + sum(right for right, _ in self._seen)) / (2 + sum(tried for _, tried in self._seen))

    def guessed(self, seconds: float) -> None:
        """What it took to come to one query and guess its answer, the model's forwards included."""
        self._guess.add(seconds)

    def searched(self, seconds: float) -> None:
        self._search.add(seconds)

    def verified(self, right: int, *, wrong: bool) -> None:
        """A search confirmed `right` guesses and, where there was a `wrong` one behind them, corrected it."""
        self._seen.append((right, right + wrong))

    def choose(self) -> int:
        if self.fixed is not None:
            return self.fixed
        if self._guess.value is None or self._search.value is None:
            return 1
        return os3(self._guess.value, self._search.value, self.gamma, asynchronous=False)
