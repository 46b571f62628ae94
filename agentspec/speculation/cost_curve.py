"""What a forward costs by its number of tokens: a fixed part and the fewest ramps that explain what was seen.

A ramp is flat, rises between two of `KNOTS` and is flat again. One of them is a machine that computes token by token,
one that starts late is a device that reads its weights in the time of many tokens, a short one the step at the end of a
tile. One ramp over all sizes is taken for granted sooner than others, and any only where the sightings leave no other
explanation: noise at single sizes makes no bends, and a plateau is flat. Forward and backward selection in weighted
least squares, by one ramp an observation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)
PRIOR_RISE = 0.02  # cost of one more token, in one-token forwards, until it was measured
PRIOR_VISITS = 0.05  # sightings that this counts for at each knot
MEMORY = 100.0  # sightings near one knot, at most: later ones replace what was seen before
RECENT = 10.0  # those that are left where all of the last ones were off to one side
LEAN_RATE = 0.1  # how fast a knot's mean residual is followed,
LEANING = 0.8  # and of how many standard deviations it is a change: 3.5 of its own
OUTLIER = 3.0  # standard deviations that one sighting may be off,
LEAST_CLIP = 0.15  # or this share, if it is more,
MOST_CLIP = 0.5  # or this, where the last ones all were
NOISE = 0.05  # standard deviation of one sighting as a share of it, to begin with
NOISE_RATE = 0.02
LEAST_NOISE = 0.005
EARLY = 64  # sightings after each of which the curve is drawn anew,
SELDOM = 4  # and of later ones every so many, since that takes longer than anything else a step does to learn
BEND = 9.0  # squared standard deviations that another ramp has to explain,
KEEP = 4.0  # and that a ramp which is there, or one over all sizes, has to
SAME = 1e-6  # of a ramp's square: two that differ by less are one
LEAST_SHARE = 0.1  # of the least that was seen, which sizes below it cost at least

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_KNOTS = np.array(KNOTS, dtype=np.float64)
_BORDERS = [(low + high) / 2 for low, high in pairwise(KNOTS)]
_RAMPS = sorted(combinations(KNOTS, 2), key=lambda ramp: ramp[0] - ramp[1])  # the longest first
_LOW, _HIGH = np.array(_RAMPS, dtype=np.float64).T
_LENGTH = _HIGH - _LOW
FIXED, LINE = 0, 1  # columns of the fixed part and of the ramp over all sizes; the other ramps follow


def _columns(tokens: float) -> Floats:
    """What each term, the fixed part first, adds to a forward of `tokens` tokens, as a share of the most."""
    return np.concatenate(([1.0], (np.minimum(np.maximum(tokens, _LOW), _HIGH) - _LOW) / _LENGTH))


_AT_KNOTS = np.array([_columns(knot) for knot in _KNOTS])
_NEEDED = np.full(_AT_KNOTS.shape[1], BEND) + 1e-6 * np.arange(_AT_KNOTS.shape[1])  # of equals the longest
_NEEDED[LINE] = KEEP


class CostCurve:
    """Seconds by tokens, never falling, from sightings that are kept as a mean near each knot."""

    def __init__(self, seen: Mapping[int, float], visits: float) -> None:
        """Start from seconds by tokens, at least one, each of which counts for `visits` sightings."""
        self._visits = np.zeros(len(KNOTS))
        self._tokens, self._seconds = _KNOTS.copy(), np.zeros(len(KNOTS))  # means of what was seen near each knot
        self._rows = _AT_KNOTS.copy()
        self._lean = np.zeros(len(KNOTS))
        self._variance = NOISE**2
        self._terms = [FIXED]
        self._sightings = 0
        for tokens, seconds in seen.items():
            self._add(_nearest(tokens), tokens, seconds, visits)
        if len(seen) == 1:
            self._assume(*next(iter(seen.items())))
        self._curve = np.full(len(KNOTS), np.average(self._seconds, weights=self._visits))
        for _ in KNOTS:
            if not self._fit():
                break

    def _assume(self, tokens: int, seconds: float) -> None:
        """Where one size is all that is known, the others cost what the prior gives."""
        for knot in np.flatnonzero(self._visits == 0):
            self._add(int(knot), KNOTS[knot], seconds * _prior(KNOTS[knot]) / _prior(tokens), PRIOR_VISITS)

    def many(self, tokens: Counts) -> Floats:
        """Seconds of each, going on behind the last knot as they rise before it."""
        beyond = np.maximum(tokens - _KNOTS[-1], 0.0)
        rise = (self._curve[-1] - self._curve[-2]) / (_KNOTS[-1] - _KNOTS[-2])
        return np.asarray(np.interp(tokens, _KNOTS, self._curve) + beyond * rise)

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from one forward."""
        knot = _nearest(tokens)
        if self._visits[knot]:
            seconds = self._judged(knot, tokens, seconds)
        self._add(knot, tokens, seconds, 1.0)
        self._sightings += 1
        if self._sightings <= EARLY or self._sightings % SELDOM == 0:
            self._fit()

    def _judged(self, knot: int, tokens: int, seconds: float) -> float:
        """`seconds` as near to what was seen near this knot as one sighting may be; notes noise and changes."""
        here, there = self.many(np.array([tokens, self._tokens[knot]]))
        expected = float(self._seconds[knot] + here - there)
        off = min(max(seconds / expected - 1.0, -MOST_CLIP), MOST_CLIP)
        known = self._visits[knot] / (self._visits[knot] + 1.0)
        self._variance += NOISE_RATE * (max(known * off * off, LEAST_NOISE**2) - self._variance)
        deviation = float(np.sqrt(self._variance))
        lean = min(max(off / deviation, -OUTLIER), OUTLIER)
        self._lean[knot] += LEAN_RATE * (lean - self._lean[knot])
        limit = max(OUTLIER * deviation, LEAST_CLIP)
        if abs(self._lean[knot]) > LEANING:
            self._visits[knot] = min(self._visits[knot], RECENT)
            limit = MOST_CLIP
        return expected * (1.0 + min(max(off, -limit), limit))

    def _add(self, knot: int, tokens: float, seconds: float, visits: float) -> None:
        share = visits / (self._visits[knot] + visits)
        self._visits[knot] = min(self._visits[knot] + visits, MEMORY)
        self._tokens[knot] += share * (tokens - self._tokens[knot])
        self._seconds[knot] += share * (seconds - self._seconds[knot])
        self._rows[knot] = _columns(self._tokens[knot])

    def _fit(self) -> bool:
        """The closest curve of the chosen terms, after the change of one of them that the sightings ask for, if any."""
        weights = self._visits / (self._variance * np.interp(self._tokens, _KNOTS, self._curve) ** 2)
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
        """Weighted least squares: seconds of each chosen term, and their covariance."""
        columns = self._rows[:, self._terms]
        weighted = columns * weights[:, None]
        square = columns.T @ weighted
        square.flat[:: len(square) + 1] *= 1.0 + 1e-9
        inverse = np.asarray(np.linalg.inv(square), dtype=np.float64)
        return inverse @ (self._seconds @ weighted), inverse

    def _rising(self, weights: Floats) -> Floats:
        """Seconds of each chosen term, without the ramps that would have to fall."""
        parts, _ = self._solved(weights)
        while len(parts) > 1 and parts[1:].min() < 0.0:
            del self._terms[1 + int(parts[1:].argmin())]
            parts, _ = self._solved(weights)
        return parts

    def _missing(self, weights: Floats, parts: Floats, inverse: Floats) -> int | None:
        """The ramp that explains most of what the chosen terms do not, where that is more than chance would.

        Of those that explain about as much one that is half as steep: between two sizes that were seen a line is the
        better guess than a leap.
        """
        columns = self._rows[:, self._terms]
        left = self._seconds - columns @ parts
        if left @ (weights * left) < (BEND if LINE in self._terms else KEEP):  # no ramp explains more than there is
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
    """The place of the ramp that explains least, where that is less than `KEEP` or it falls; else 0."""
    if len(parts) == 1:
        return 0
    strength = np.sign(parts) * parts**2 / inverse.diagonal()
    weak = 1 + int(strength[1:].argmin())
    return weak if strength[weak] < KEEP else 0


def _nearest(tokens: float) -> int:
    """The place of the nearest knot, of two the smaller."""
    return bisect_left(_BORDERS, tokens)


def _prior(tokens: float) -> float:
    return 1.0 + PRIOR_RISE * (tokens - 1.0)
