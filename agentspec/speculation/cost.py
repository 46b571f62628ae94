"""The cost of a forward, learned from measurements: by its tokens, the KV slots that it reads and its sequences.

`CostCurve` is a fixed part and the fewest ramps that explain the measurements. A ramp is flat, rises between two of
`KNOTS` and is flat again. A ramp over all sizes describes a machine that computes
token by token; a ramp that starts late, a device that reads its weights in the time of many tokens; a short ramp, the
step at the end of a tile. The ramp over all sizes needs less evidence than others, but each must explain more than
noise would: so noise at single sizes makes no bends, and a plateau stays flat. The ramps are chosen by forward and
backward selection in weighted least squares, which adds or removes one ramp per fit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, pairwise, repeat
from statistics import median

import numpy as np
from numpy.typing import NDArray

KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)
PRIOR_RISE = 0.02  # assumed cost of one more token, as a share of a one-token forward, until it is measured
PRIOR_VISITS = 0.05  # measurements that this assumption counts for at each knot
PRIOR_NOISE = 0.5  # standard deviation of this assumption, as a share of it
SPREAD = 4  # the largest measured size over the smallest, from which it is not needed any more
MEASURED = 0.5  # measurements from which a knot's mean is more than that assumption
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
EARLY = 64  # the curve is fitted after each of the first measurements,
SELDOM = 4  # and then after every fourth, since fitting is the slowest part of a step's learning
BEND = 9.0  # squared standard deviations that a new ramp must explain
KEEP = 4.0  # squared standard deviations that a chosen ramp, or the ramp over all sizes, must explain
SAME = 1e-6  # share of a ramp's square: ramps that differ by less are the same
LEAST_SHARE = 0.1  # the curve never falls below this share of the lowest measured cost

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_KNOTS = np.array(KNOTS, dtype=np.float64)
_BORDERS = [(low + high) / 2 for low, high in pairwise(KNOTS)]
_RAMPS = sorted(combinations(KNOTS, 2), key=lambda ramp: ramp[0] - ramp[1])  # longest first
_LOW, _HIGH = np.array(_RAMPS, dtype=np.float64).T
_LENGTH = _HIGH - _LOW
FIXED, LINE = 0, 1  # columns of the fixed part and of the ramp over all sizes; the other ramps follow


def _columns(tokens: float) -> Floats:
    """The share of its full height that each term, the fixed part first, adds to a forward of `tokens` tokens."""
    return np.concatenate(([1.0], (np.minimum(np.maximum(tokens, _LOW), _HIGH) - _LOW) / _LENGTH))


_AT_KNOTS = np.array([_columns(knot) for knot in _KNOTS])
_NEEDED = np.full(_AT_KNOTS.shape[1], BEND) + 1e-6 * np.arange(_AT_KNOTS.shape[1])  # of equals the longest wins
_NEEDED[LINE] = KEEP


class CostCurve:
    """Seconds by tokens, never falling, fitted to measurements that are kept as one mean near each knot."""

    def __init__(self, seen: Mapping[int, float], visits: Iterable[float]) -> None:
        """Start from at least one pair of tokens and seconds; each counts for so many measurements as `visits` says."""
        self._visits = np.zeros(len(KNOTS))
        self._tokens, self._seconds = _KNOTS.copy(), np.zeros(len(KNOTS))  # means of the measurements near each knot
        self._rows = _AT_KNOTS.copy()
        self._lean = np.zeros(len(KNOTS))
        self._variance = NOISE**2
        self._terms = [FIXED]
        self._sightings = 0
        for (tokens, seconds), count in zip(seen.items(), visits, strict=False):
            self._add(nearest(tokens), tokens, seconds, count)
        self._assumed = len(seen) == 1
        if self._assumed:
            self._assume(*next(iter(seen.items())))
        self._curve = np.full(len(KNOTS), np.average(self._seconds, weights=self._visits))
        for _ in KNOTS:
            if not self._fit():
                break

    def _assume(self, tokens: int, seconds: float) -> None:
        """Fill in the other sizes by the prior, if only one size is known."""
        for knot in np.flatnonzero(self._visits == 0):
            self._add(int(knot), KNOTS[knot], seconds * _prior(KNOTS[knot]) / _prior(tokens), PRIOR_VISITS)

    def _drop_assumptions(self) -> None:
        """Forget what was assumed of other sizes, once the measured ones are far enough apart to show a slope."""
        if not self._assumed:
            return
        measured = np.flatnonzero(self._visits >= MEASURED)
        if len(measured) and KNOTS[measured[-1]] >= SPREAD * KNOTS[measured[0]]:
            self._visits[self._visits < MEASURED] = 0.0
            self._terms, self._assumed = [FIXED], False  # the others may have explained nothing but assumptions

    def many(self, tokens: Counts) -> Floats:
        """Seconds of each number of tokens; beyond the last knot the curve continues with its last slope."""
        beyond = np.maximum(tokens - _KNOTS[-1], 0.0)
        rise = (self._curve[-1] - self._curve[-2]) / (_KNOTS[-1] - _KNOTS[-2])
        return np.asarray(np.interp(tokens, _KNOTS, self._curve) + beyond * rise)

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from one forward."""
        knot = nearest(tokens)
        self._add(knot, tokens, self._judged(knot, tokens, seconds), 1.0)
        self._drop_assumptions()
        self._sightings += 1
        if self._sightings <= EARLY or self._sightings % SELDOM == 0:
            self._fit()

    def is_measured(self, tokens: int) -> bool:
        """Whether the estimate for this size rests on a measurement near it, not on other sizes alone."""
        return bool(self._visits[nearest(tokens)] >= MEASURED)

    def _judged(self, knot: int, tokens: int, seconds: float) -> float:
        """Clip `seconds` to what one measurement may differ from the estimate; update noise and detect a change.

        The fewer measurements an estimate rests on, the more the next one may differ. The first one at a size may be as
        much as larger sizes took and as little as smaller ones: a wrong guess would otherwise stand, and its error be
        taken for a slower machine.
        """
        here, there = self.many(np.array([tokens, self._tokens[knot]]))
        visits, mean = self._visits[knot], self._seconds[knot]
        known = visits >= MEASURED
        expected = float(max(mean + here - there, LEAST_SHARE * mean) if known else here)
        noticed = self._noticed(knot, seconds / expected - 1.0)
        limit = max(noticed, (1.0 + visits) ** -2)
        least, most = expected / (1.0 + limit), expected * (1.0 + limit)
        smaller, larger = (None, None) if known else self._neighbours(knot)
        if larger is not None:
            most = max(expected, larger) * (1.0 + noticed)
        if smaller is not None:
            least = min(expected, smaller) / (1.0 + noticed)
        return float(min(max(seconds, least), most))

    def _neighbours(self, knot: int) -> tuple[float | None, float | None]:
        """The largest mean measured at smaller sizes, and the least one measured at larger sizes."""
        measured = self._visits >= MEASURED
        smaller, larger = self._seconds[:knot][measured[:knot]], self._seconds[knot:][measured[knot:]]
        return max(smaller.tolist(), default=None), min(larger.tolist(), default=None)

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
        self._rows[knot] = _columns(self._tokens[knot])

    def _fit(self) -> bool:
        """Remove a weak term or add a missing one, if the data ask for it, and fit the curve; True if terms changed."""
        certain = np.where(self._visits < MEASURED, PRIOR_NOISE**-2, self._visits / self._variance) * (self._visits > 0)
        weights = certain / np.interp(self._tokens, _KNOTS, self._curve) ** 2
        # The means move: a ramp that began below the largest measured size may come to lie above it.
        highest = self._rows[self._visits > 0].max(axis=0)
        self._terms = [term for term in self._terms if highest[term] > 0.0]
        parts, inverse = self._solved(weights)
        weak = _weakest(parts, inverse)
        more = None if weak else self._missing(weights, parts, inverse)
        if weak:
            del self._terms[weak]
        elif more:
            self._terms.append(more)
        if weak or more:
            parts = self._rising(weights)
        least = self._seconds[self._visits > 0].min()
        self._curve = np.maximum(_AT_KNOTS[:, self._terms] @ parts, LEAST_SHARE * least)
        return bool(weak or more)

    def _solved(self, weights: Floats) -> tuple[Floats, Floats]:
        """Weighted least squares: the seconds of each chosen term, and their covariance."""
        columns = self._rows[:, self._terms]
        weighted = columns * weights[:, None]
        square = columns.T @ weighted
        square.flat[:: len(square) + 1] *= 1.0 + 1e-9
        inverse = np.asarray(np.linalg.inv(square), dtype=np.float64)
        return inverse @ (self._seconds @ weighted), inverse

    def _rising(self, weights: Floats) -> Floats:
        """The seconds of each chosen term, after removing the ramps that would have to fall."""
        parts, _ = self._solved(weights)
        while len(parts) > 1 and parts[1:].min() < 0.0:
            del self._terms[1 + int(parts[1:].argmin())]
            parts, _ = self._solved(weights)
        return parts

    def _missing(self, weights: Floats, parts: Floats, inverse: Floats) -> int | None:
        """The ramp that explains most of the residuals, if that is more than noise would; else None.

        Of ramps that explain about as much, it prefers the less steep: between two measured sizes a line is a better
        guess than a jump.
        """
        columns = self._rows[:, self._terms]
        left = self._seconds - columns @ parts
        if left @ (weights * left) < (BEND if LINE in self._terms else KEEP):  # no ramp can explain more
            return None
        weighted = self._rows * weights[:, None]
        shared = weighted.T @ columns
        whole = np.einsum("ij,ij->j", weighted, self._rows)
        own = whole - np.einsum("ij,ij->i", shared @ inverse, shared)
        rise = np.maximum(left @ weighted, 0.0)
        gain = np.where(own > SAME * whole, rise * rise / np.maximum(own, SAME * whole + 1e-12), 0.0)
        enough = np.flatnonzero(gain > _NEEDED)
        if LINE in enough or not len(enough):
            return LINE if len(enough) else None
        steepness = np.log2(rise[enough] / (own[enough] * _LENGTH[enough - 1]))
        return int(enough[np.argmax(gain[enough] - _NEEDED[enough] - steepness)])


def _weakest(parts: Floats, inverse: Floats) -> int:
    """The index of the ramp that explains least, if it explains less than `KEEP` or falls; else 0."""
    if len(parts) == 1:
        return 0
    strength = np.sign(parts) * parts**2 / inverse.diagonal()
    weak = 1 + int(strength[1:].argmin())
    return weak if strength[weak] < KEEP else 0


def nearest(tokens: float) -> int:
    """The index in `KNOTS` of the nearest knot; of two equally near ones, the smaller."""
    return bisect_left(_BORDERS, tokens)


def _prior(tokens: float) -> float:
    return 1.0 + PRIOR_RISE * (tokens - 1.0)


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
