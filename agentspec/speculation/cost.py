"""The cost of a forward, learned from measurements: by its tokens, the KV slots that it reads and its sequences."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, repeat
from statistics import median

import numpy as np
from numpy.typing import NDArray

KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)
PRIOR_RISE = 0.02  # assumed cost of one more token, as a share of a one-token forward, until it is measured
SPREAD = 4  # of the largest measured size to the smallest: below it a slope is hardly measured
EARLY = 64  # the curve is fitted after each of the first measurements,
SELDOM = 4  # and then after every fourth
MEMORY = 100.0  # most measurements that count at one knot: later ones replace earlier ones
RECENT = 10.0  # measurements that still count after the machine's cost has changed
LEAN_RATE = 0.1  # how fast a knot's mean residual is followed
LEANING = 0.8  # a mean residual of so many standard deviations of a measurement, 3.5 of its own, signals a change
OUTLIER = 3.0  # one measurement is clipped to this many standard deviations,
LEAST_CLIP = 0.15  # or to this share, if it is larger,
MOST_CLIP = 0.5  # or to this share after a change
NOISE = 0.05  # initial standard deviation of a measurement, as a share of it
NOISE_RATE = 0.02
LEAST_NOISE = 0.005
LEAST_SHARE = 0.1  # an estimate is at least this share of what its size took
RISE = 4.0  # squared standard deviations that a slope must explain
BEND = 9.0  # squared standard deviations that a flat part must explain more than a line

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_KNOTS = np.array(KNOTS, dtype=np.float64)
_BORDERS = [(low + high) / 2 for low, high in pairwise(KNOTS)]


class CostCurve:
    """Seconds by tokens, never falling, fitted to measurements that are stored as one mean near each knot.

    It is flat up to one of `KNOTS` and then a line, by weighted least squares: a machine that computes token by token
    has no flat part, a device that reads its weights in the time of many tokens a long one. A slope, and a flat part,
    must each explain more than noise would; until sizes far apart are measured, a slope that does not is assumed.
    """

    def __init__(self, seen: Mapping[int, float], visits: Iterable[float]) -> None:
        """Start from at least one pair of tokens and seconds; each counts for so many measurements as `visits` says."""
        self._visits = np.zeros(len(KNOTS))
        self._tokens, self._seconds = _KNOTS.copy(), np.zeros(len(KNOTS))  # means of the measurements near each knot
        self._lean = np.zeros(len(KNOTS))
        self._variance = NOISE**2
        self._sightings = 0
        for (tokens, seconds), count in zip(seen.items(), visits, strict=False):
            self._add(nearest(tokens), tokens, seconds, count)
        self._fit()

    def many(self, tokens: Counts) -> Floats:
        """Seconds of each number of tokens."""
        return np.asarray(self._fixed + self._slope * np.maximum(tokens - self._flat, 0.0))

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from one forward."""
        knot = nearest(tokens)
        self._add(knot, tokens, self._judged(knot, tokens, seconds), 1.0)
        self._sightings += 1
        if self._sightings <= EARLY or self._sightings % SELDOM == 0:
            self._fit()

    def is_measured(self, tokens: int) -> bool:
        """Whether the estimate for this size rests on a measurement near it, not on other sizes alone."""
        return bool(self._visits[nearest(tokens)] > 0)

    def _judged(self, knot: int, tokens: int, seconds: float) -> float:
        """Clip `seconds` to what one measurement may differ from the estimate; update noise and detect a change.

        The fewer measurements an estimate rests on, the more the next one may differ. The first one at a size may be as
        much as larger sizes took and as little as smaller ones: a wrong guess would otherwise stand, and its error be
        taken for a slower machine.
        """
        here, there = self.many(np.array([tokens, self._tokens[knot]]))
        visits, mean = self._visits[knot], self._seconds[knot]
        expected = float(max(mean + here - there, LEAST_SHARE * mean) if visits else here)
        noticed = self._noticed(knot, seconds / expected - 1.0)
        limit = max(noticed, (1.0 + visits) ** -2)
        least, most = expected / (1.0 + limit), expected * (1.0 + limit)
        if not visits:
            measured = self._visits > 0
            if measured[knot:].any():
                most = max(expected, self._seconds[knot:][measured[knot:]].min()) * (1.0 + noticed)
            if measured[:knot].any():
                least = min(expected, self._seconds[:knot][measured[:knot]].max()) / (1.0 + noticed)
        return float(min(max(seconds, least), most))

    def _noticed(self, knot: int, off: float) -> float:
        """Learn from a residual, as a share, how noisy measurements are and whether the knot's cost has changed.

        Returns how far one measurement may differ.
        """
        off = min(max(off, -MOST_CLIP), MOST_CLIP)
        known = self._visits[knot] / (self._visits[knot] + 1.0)
        self._variance += NOISE_RATE * (max(known * off * off, LEAST_NOISE**2) - self._variance)
        deviation = float(np.sqrt(self._variance))
        lean = min(max(off / deviation, -OUTLIER), OUTLIER)
        self._lean[knot] += LEAN_RATE * (lean - self._lean[knot])
        if abs(self._lean[knot]) > LEANING:
            self._visits[knot] = min(self._visits[knot], RECENT)
            return MOST_CLIP
        return max(OUTLIER * deviation, LEAST_CLIP)

    def _add(self, knot: int, tokens: float, seconds: float, visits: float) -> None:
        share = visits / (self._visits[knot] + visits)
        self._visits[knot] = min(self._visits[knot] + visits, MEMORY)
        self._tokens[knot] += share * (tokens - self._tokens[knot])
        self._seconds[knot] += share * (seconds - self._seconds[knot])

    def _fit(self) -> None:
        """Choose the flat part, the level and the slope that explain the measurements best."""
        measured = np.flatnonzero(self._visits)
        tokens, seconds, visits = self._tokens[measured], self._seconds[measured], self._visits[measured]
        weights = visits / (self._variance * seconds**2)
        total = weights.sum()
        level = seconds @ weights / total
        narrow = tokens[-1] < SPREAD * tokens[0]
        flats = _KNOTS[:1] if narrow else _KNOTS[tokens[-1] > _KNOTS]
        rises = np.maximum(tokens - flats[:, None], 0.0)  # [flats, sizes]
        mean = rises @ weights / total
        off = rises - mean[:, None]
        slopes = np.maximum((off * weights) @ (seconds - level) / np.maximum((off * off) @ weights, 1e-12), 0.0)
        fixed = level - slopes * mean
        errors = ((fixed[:, None] + slopes[:, None] * rises - seconds) ** 2) @ weights
        errors[1:] += BEND
        errors[fixed <= 0.0] = np.inf
        best = int(errors.argmin())
        self._flat, self._fixed, self._slope = flats[best], fixed[best], slopes[best]
        if weights @ (seconds - level) ** 2 < errors[best] + (BEND if narrow else RISE):
            rise = PRIOR_RISE if narrow else 0.0
            self._fixed = level / (1.0 + rise * mean[0])
            self._slope = rise * self._fixed


def nearest(tokens: float) -> int:
    """The index in `KNOTS` of the nearest knot; of two equally near ones, the smaller."""
    return bisect_left(_BORDERS, tokens)


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
    cost of one more sequence without its tokens. `speed` follows the machine as a whole, so that a busy minute measured
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
        """Start again from timed forwards (tokens, seconds), at least one, of one sequence without context.

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
