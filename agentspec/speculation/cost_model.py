"""Estimates the seconds of a forward by its tokens, the KV slots it reads and its sequences, from measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from statistics import median

import numpy as np

from agentspec.speculation.cost_curve import KNOTS, CostCurve, Counts, Floats, nearest

GUESS_SECONDS = 0.03  # assumed for a one-token forward until one is measured
SPEED_RATE = 0.2  # how fast the machine's overall speed is followed
SPEED_CLIP = 4.0  # one measurement counts as at most this factor
CALIBRATION_WEIGHT = 2.0  # measurements that a calibrated size counts for
MEDIAN_WEIGHT = 10.0  # most measurements that a size's median counts for
PER_SEQUENCE_RATE = 0.015  # how fast the cost per sequence is followed: most errors are the curve's or noise
PER_SEQUENCE_CLIP = 0.5  # one measurement counts as at most this share


class CostModel:
    """Estimates the seconds of one forward by its tokens, the KV slots it reads and its sequences.

    cost = speed * (curve(tokens) + (per_context + per_token_context * tokens / batch) * context
    + per_sequence * (batch - 1)): `context` counts the KV slots of all `batch` sequences, and `per_sequence` is the
    cost of one more sequence besides its tokens. `speed` follows the machine as a whole, so that a busy minute measured
    at one size does not make the other sizes look cheap.
    """

    def __init__(self) -> None:
        self._per_context = 0.0
        self._per_token_context = 0.0
        self._per_sequence = 0.0
        self._speed = 1.0
        self.calibrate([(1, 0, GUESS_SECONDS)])
        self._measured = False

    def calibrate(self, samples: Sequence[tuple[int, int, float]], batches: Sequence[tuple[int, float]] = ()) -> None:
        """Start from timed forwards (tokens, context, seconds), at least one; replaces everything learned before.

        Samples with the shortest context give the curve, by each size's fastest; the others give the cost of context.
        `batches` are timed forwards (sequences, seconds) of one token for each of several sequences.
        """
        near = min(context for _, context, _ in samples)
        sizes = _fastest((tokens, seconds) for tokens, context, seconds in samples if context == near)
        self._curve = CostCurve(sizes, repeat(CALIBRATION_WEIGHT))
        self._speed, self._measured = 1.0, True
        far = [(t, (seconds - self._base(t)) / (context - near)) for t, context, seconds in samples if context > near]
        self._per_context, self._per_token_context = _line(sorted(_fastest(far).items()))
        shares = [(seconds - self._base(count)) / (count - 1) for count, seconds in _fastest(batches).items()]
        self._per_sequence = max(0.0, sum(shares) / len(shares)) if shares else 0.0

    def seconds(self, tokens: int, context: int = 0, batch: int = 1) -> float:
        """The estimated seconds of a forward of `tokens` tokens of `batch` sequences with `context` KV slots in all."""
        return float(self.many(np.array([tokens]), context, batch)[0])

    def many(self, tokens: Counts, context: int = 0, batch: int = 1) -> Floats:
        """`seconds` for each number of tokens."""
        return self._speed * (self._curve.many(tokens) + self._added(tokens, context, batch))

    def observe(self, tokens: int, context: int, seconds: float, batch: int = 1) -> None:
        """Learn from one measured forward."""
        if not self._measured:
            self.calibrate([(tokens, context, seconds)])
        ratio = seconds / self.seconds(tokens, context, batch)
        if self._curve.is_measured(tokens):  # else the estimate may be what is wrong, not the speed
            self._speed *= min(max(ratio, 1 / SPEED_CLIP), SPEED_CLIP) ** SPEED_RATE
        alone = seconds / self._speed - float(self._added(tokens, context, batch))
        if batch > 1:
            base = self._base(tokens)
            off = min(max(alone - base, -PER_SEQUENCE_CLIP * base), PER_SEQUENCE_CLIP * base)
            self._per_sequence = max(0.0, self._per_sequence + PER_SEQUENCE_RATE * off / batch)
        self._curve.observe(tokens, alone)

    def relearn(self, samples: Iterable[tuple[int, float]]) -> None:
        """Start anew from timed forwards (tokens, seconds), at least one, of one sequence without context.

        The medians near each size are taken, so that neither the forwards that came first nor a few that were disturbed
        count for more than others. Replaces everything learned before.
        """
        near: dict[int, list[tuple[int, float]]] = {}
        for tokens, seconds in samples:
            near.setdefault(nearest(tokens), []).append((tokens, seconds))
        middle = {round(median(t for t, _ in of)): median(s for _, s in of) for of in near.values()}
        self._curve = CostCurve(middle, [min(len(of), MEDIAN_WEIGHT) for of in near.values()])
        self._speed, self._measured = 1.0, True
        self._per_context = self._per_token_context = self._per_sequence = 0.0

    def _added(self, tokens: Counts | int, context: int, batch: int) -> Floats:
        return np.asarray(
            (self._per_context + self._per_token_context * tokens / batch) * context + self._per_sequence * (batch - 1)
        )

    def _base(self, tokens: int) -> float:
        return float(self._curve.many(np.array([tokens]))[0])

    def table(self) -> dict[int, float]:
        """Seconds per forward of one sequence by number of tokens, without context."""
        return {knot: self.seconds(knot) for knot in KNOTS}


def _fastest(pairs: Iterable[tuple[int, float]]) -> dict[int, float]:
    """The least of each key's values, since disturbances only make a timing longer."""
    best: dict[int, float] = {}
    for key, value in pairs:
        best[key] = min(value, best.get(key, value))
    return best


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Intercept and slope, neither negative, of the line through the first and the last point; zeros without points."""
    if not points:
        return 0.0, 0.0
    (x0, y0), (x1, y1) = points[0], points[-1]
    rise = max(0.0, (y1 - y0) / (x1 - x0)) if x1 > x0 else 0.0
    return max(0.0, y0 - rise * x0), rise
