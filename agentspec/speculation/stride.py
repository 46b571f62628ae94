"""Decides whether to guess documents before the knowledge base has answered, and how many neighbours at a time.

`os3` is the optimal speculation stride of RaLMSpec (OS3; Zhang et al. 2024, arXiv 2401.14021, section 4 and appendix
A.1). Documents are guessed one by one, since each search runs with the rounds that follow; with a fast knowledge base
sequential retrieval is faster.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

MOST: Final = 16  # most rounds generated before verification
WINDOW: Final = 5  # verifications from which the hit rate is estimated
PRIOR: Final = 0.5  # assumed hit rate before the first guess
PRIOR_WEIGHT: Final = 2.0  # guesses that this assumption counts for
RATE: Final = 0.3  # how fast measured times are followed
WASTE: Final = 0.5  # share of a round that is lost when the round is aborted
MARGIN: Final = 0.95  # speculation must take at most this share of sequential retrieval's time
TRIAL: Final = 4  # kept rounds after which speculation is judged by the time it took
FIRST_PAUSE: Final = 8
LONGEST_PAUSE: Final = 256  # most rounds in a row without speculation
BALANCE_FADE: Final = 0.8


def os3(generation: float, retrieval: float, gamma: float) -> int:
    """The stride with the most verified rounds per second by the paper's formula, where the answer waits for each
    verification: a round takes `generation` seconds, verifying `retrieval` seconds. A stride adds the rounds before the
    first wrong guess, and the one redone.
    """
    return max(range(1, MOST + 1), key=lambda s: sum(gamma**i for i in range(s)) / (s * generation + retrieval))


def guessed(generation: float, retrieval: float, gamma: float) -> float:
    """Seconds per kept round if each guess is verified while the following rounds are generated.

    A right guess costs only its round. A wrong guess is noticed when its search ends, as in sequential retrieval, and
    the round generated meanwhile is lost.
    """
    return generation + (1 - gamma) * (retrieval + WASTE * generation)


@dataclass(slots=True)
class RunningMean:
    """A running mean of measured times that follows the latest ones."""

    value: float | None = None

    def add(self, seconds: float) -> None:
        self.value = seconds if self.value is None else self.value + RATE * (seconds - self.value)


@dataclass(slots=True)
class StrideMeasurements:
    """The measurements of all requests of one model and one knowledge base. Not thread-safe.

    `alone_retrieval` is the time of a search that the request waited for. `alone` is the time of a round without
    concurrent verification, by whether its document differs from that of the round before. `spent` is the time that
    recent speculated rounds took, `plain` the estimate for the same rounds by sequential retrieval. Unless `spent` is
    clearly less, speculation pauses, each time for longer, so that trying it costs only a small part of the time.
    """

    generation: RunningMean = field(default_factory=RunningMean)
    retrieval: RunningMean = field(default_factory=RunningMean)
    alone_retrieval: RunningMean = field(default_factory=RunningMean)
    alone: dict[bool, RunningMean] = field(default_factory=lambda: {True: RunningMean(), False: RunningMean()})
    right: float = PRIOR * PRIOR_WEIGHT
    guesses: float = PRIOR_WEIGHT
    spent: float = 0.0
    plain: float = 0.0
    trial: int = 0
    pause: int = 0
    skip: int = 0

    @property
    def gamma(self) -> float:
        return self.right / self.guesses

    def guessed(self, right: int, wrong: int) -> None:
        fade = 0.98 ** (right + wrong)
        self.right = self.right * fade + right
        self.guesses = self.guesses * fade + right + wrong

    def retrieved(self, seconds: float, *, alone: bool) -> None:
        self.retrieval.add(seconds)
        if alone:
            self.alone_retrieval.add(seconds)

    def generated(self, seconds: float, *, changed: bool, alone: bool) -> None:
        self.generation.add(seconds)
        if alone:
            self.alone[changed].add(seconds)

    def kept(self, changed: bool, seconds: float) -> None:
        """Record that speculation added one more round in `seconds` of wall time, including retrieval."""
        alone = self.alone[changed].value or self.alone[not changed].value
        if alone is None or self.alone_retrieval.value is None:
            return
        self.spent = self.spent * BALANCE_FADE + seconds
        self.plain = self.plain * BALANCE_FADE + alone + self.alone_retrieval.value
        self.trial += 1
        if self.trial >= TRIAL:
            self._judge()

    def _judge(self) -> None:
        self.trial = 0
        if self.spent > MARGIN * self.plain:
            self.pause = min(max(FIRST_PAUSE, 2 * self.pause), LONGEST_PAUSE)
            self.skip, self.spent, self.plain = self.pause, 0.0, 0.0
        else:
            self.pause = 0


@dataclass(slots=True)
class StrideGovernor:
    """Chooses after how many guesses to verify, 0 for none: always `stride`, or by the measurements 0 or 1."""

    measured: StrideMeasurements = field(default_factory=StrideMeasurements)
    stride: int | None = None
    _window: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def gamma(self) -> float:
        """The share of right guesses in the last verifications, smoothed by the share over all requests."""
        right, wrong = (sum(seen) for seen in zip(*self._window, strict=True)) if self._window else (0, 0)
        weight = PRIOR_WEIGHT
        return (right + self.measured.gamma * weight) / (right + wrong + weight)

    def verified(self, right: int, *, wrong: bool) -> None:
        """Record a verification: `right` guesses before the first wrong one, and whether there was a wrong one."""
        self._window.append((right, int(wrong)))
        self.measured.guessed(right, int(wrong))

    def choose(self) -> int:
        """The stride of the next round."""
        if self.stride is not None:
            return self.stride
        generation, retrieval = self.measured.generation.value, self.measured.retrieval.value
        if generation is None or retrieval is None:
            return 0
        if self.measured.skip > 0:
            self.measured.skip -= 1
            return 0
        return int(guessed(generation, retrieval, self.gamma) < MARGIN * (generation + retrieval))
