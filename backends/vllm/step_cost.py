"""Learns the time of a server's engine step by its number of tokens, also by steps made to learn it."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.index import StepCurve
from agentspec.speculation.cost import KNOTS, CostModel

_FINEST = (KNOTS[-1] - 1).bit_length()
_FAR = 16384  # tokens up to which the cost of a step is extrapolated
_WINDOW = 128  # the last steps, from which the cost is learned
_EARLY, _OFTEN = 16, 64  # steps up to which that is done after each, and after every fourth; later after every eighth,
_EVERY, _SELDOM = 4, 8  # since it takes as long as drafting a hundred tokens

Later = Callable[[Callable[[], None]], None]
"""Has what it is given done soon, by one thread, in order."""

Floats = NDArray[np.float64]

_TOKENS: Floats = np.array([*KNOTS, _FAR], dtype=np.float64)
LIKELY = 0.5  # a trial drafts tokens that are at least as likely, so that it gains something in any case
_FIRST = 8  # rounds before the first trial
_MOST = 256  # most rounds between two: each that finds nothing new doubles them
_CHEAPER = 0.25  # a trial that took less than expected by this share has found something, and the next round is one too


class StepTimeModel:
    """Seconds of one engine step by its tokens, learned from the last steps alone.

    A model that follows single steps may settle on a wrong division of what it sees into the machine's speed and the
    sizes' cost, if the first steps take longer or shorter than later ones. Sizes that have not come for long are
    guessed, and so tried again. Sizes are told apart less finely if some of them are beyond the model's largest knot.
    """

    def __init__(self, later: Later = lambda learn: learn()) -> None:
        """Learning is handed to `later`, or done at once. One thread calls all methods."""
        self._later = later
        self._model = CostModel()
        self._recent: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._steps = 0
        self._use(self._read())

    @property
    def curve(self) -> StepCurve:
        return self._curve

    def seconds(self, tokens: int) -> float:
        """What a step of so many tokens takes. Asked several times a step, for which `numpy.interp` is too slow."""
        points, seconds = self._points
        behind = bisect_right(points, tokens)
        if behind in (0, len(points)):
            return seconds[max(0, behind - 1)]
        low, high = points[behind - 1], points[behind]
        return seconds[behind - 1] + (seconds[behind] - seconds[behind - 1]) * (tokens - low) / (high - low)

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from one step."""
        self._steps += 1
        self._recent.append((tokens, seconds))
        if self._steps % (1 if self._steps <= _EARLY else _EVERY if self._steps <= _OFTEN else _SELDOM) == 0:
            recent = tuple(self._recent)
            self._later(lambda: self._learn(recent))

    def _learn(self, recent: tuple[tuple[int, float], ...]) -> None:
        most = max(tokens for tokens, _ in recent)
        unit = 1 << max(0, (most - 1).bit_length() - _FINEST)
        self._model.relearn((max(1, round(tokens / unit)), seconds) for tokens, seconds in recent)
        self._use(self._read(unit))

    def _use(self, curve: StepCurve) -> None:
        tokens: list[float] = curve.tokens.tolist()
        seconds: list[float] = curve.seconds.tolist()
        self._curve, self._points = curve, (tokens, seconds)

    def _read(self, unit: int = 1) -> StepCurve:
        return StepCurve(unit * _TOKENS, self._model.many(_TOKENS.astype(np.int64)))

    def least_acceptance(self, requests: int) -> float:
        """The acceptance probability below which no draft token pays in a step of `requests` requests."""
        one, two = self.seconds(requests), self.seconds(requests + 1)
        return min(1.0, max(0.0, (two - one) * requests / one))


class TrialSteps:
    """Says which rounds are trials: their steps verify all likely tokens whatever the learned cost says, so that it
    cannot be wrong unnoticed. While large steps are thought to be dear none is made, and nothing corrects that.
    """

    def __init__(self) -> None:
        self._wait, self._since = _FIRST, 0
        self._under_way = False

    def begin(self) -> bool:
        """Count a round whose chains may be of any length; True if it is a trial."""
        self._since += 1
        self._under_way = self._since >= self._wait
        if self._under_way:
            self._since = 0
        return self._under_way

    def measured(self, expected: float, seconds: float) -> None:
        """Learn what the step of the last round took, in seconds, and what was expected of its size."""
        if self._under_way:
            found = seconds < (1.0 - _CHEAPER) * expected
            self._wait = 1 if found else min(max(2 * self._wait, _FIRST), _MOST)
        self._under_way = False
