"""The cost of a forward, learned from measurements: by its tokens, the KV slots that it reads and its sequences."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)
PRIOR_RISE = 0.02  # assumed cost of one more token, as a share of a one-token forward, until it is measured
SPREAD = 4  # of the largest measured size to the smallest: below it a slope is hardly measured
EARLY = 64  # the curve is fitted after each of the first measurements,
SELDOM = 4  # and then after every fourth
WINDOW = 32  # measurements near one knot that count: later ones replace earlier ones
NOISE = 0.05  # initial standard deviation of a measurement, as a share of it
NOISE_RATE = 0.02
LEAST_NOISE, MOST_NOISE = 0.005, 0.5
RISE = 4.0  # squared standard deviations that a slope must explain
BEND = 9.0  # squared standard deviations that a flat part must explain more than a line

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

_KNOTS = np.array(KNOTS, dtype=np.float64)
_BORDERS = [(low + high) / 2 for low, high in pairwise(KNOTS)]


class CostCurve:
    """Seconds by tokens, never falling, fitted to the medians of the latest measurements near each knot.

    It is flat up to one of `KNOTS` and then a line, by weighted least squares: a machine that computes token by token
    has no flat part, a device that reads its weights in the time of many tokens a long one. A slope, and a flat part,
    must each explain more than noise would; until sizes far apart are measured, a slope that does not is assumed.
    """

    def __init__(self, measured: Iterable[tuple[int, float]]) -> None:
        """Start from pairs of tokens and seconds, at least one."""
        self._recent = [deque[tuple[float, int]](maxlen=WINDOW) for _ in KNOTS]
        self._tokens, self._seconds, self._counts = _KNOTS.copy(), np.zeros(len(KNOTS)), np.zeros(len(KNOTS))
        self._variance = NOISE**2
        self._observed, self._confirmed, self._fresh = 0, set[int](), set[int]()
        for tokens, seconds in measured:
            self._add(tokens, seconds)
        self._fit()

    def many(self, tokens: Counts) -> Floats:
        """Seconds of each number of tokens."""
        return np.asarray(self._fixed + self._slope * np.maximum(tokens - self._flat, 0.0))

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from one forward."""
        off = seconds / float(self.many(np.array([tokens]))[0]) - 1.0
        self._variance += NOISE_RATE * (min(max(off * off, LEAST_NOISE**2), MOST_NOISE**2) - self._variance)
        self._add(tokens, seconds)
        self._confirmed.add(nearest(tokens))
        self._observed += 1
        if self._observed <= EARLY or self._observed % SELDOM == 0:
            self._fit()

    def is_measured(self, tokens: int) -> bool:
        """Whether the estimate for this size rests on a measurement near it, not on other sizes alone."""
        return bool(self._recent[nearest(tokens)])

    def doubt(self) -> None:
        """Forget the sizes that were never observed: a start that was wrong about one is not trusted about others."""
        for knot in set(range(len(KNOTS))) - self._confirmed:
            self._recent[knot].clear()
            self._counts[knot] = 0

    def _add(self, tokens: int, seconds: float) -> None:
        self._recent[nearest(tokens)].append((seconds, tokens))
        self._fresh.add(nearest(tokens))

    def _fit(self) -> None:
        """Choose the flat part, the level and the slope that explain the measurements best."""
        for knot in self._fresh:
            recent = sorted(self._recent[knot])
            self._seconds[knot], self._tokens[knot] = recent[(len(recent) - 1) // 2]  # of two the less disturbed one
            self._counts[knot] = len(recent)
        self._fresh.clear()
        measured = np.flatnonzero(self._counts)
        tokens, seconds = self._tokens[measured], self._seconds[measured]
        weights = self._counts[measured] / (self._variance * seconds**2)
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
LEAST_SHARE = 0.1  # of what its tokens are estimated to take; what context leaves of a forward tells no less of them
SPEED_RATE = 0.2  # how fast the machine's overall speed is followed
SPEED_CLIP = 4.0  # one measurement counts as at most this factor
FIRST_TRIAL, LAST_TRIAL = 8, 512  # forwards of one kind in a row, with drafts or without, before one of the other
SURPRISE = 1.5  # a forward that is off by this factor makes trials frequent again
LIKELY_EXTRA = np.array([1e-4, 1e-5, 0.1])  # of a one-token forward: what slots and sequences may well cost
TRUST = 2.0  # standard deviation of what was measured at the start, as a share of it
FORGETTING = 4e-4  # of what was learned since, in each forward
CURVE_NOISE = 0.15  # standard deviation of the curve's estimates and of a measurement, as a share


class CostModel:
    """Estimates the seconds of one forward by its tokens, the KV slots it reads and its sequences.

    cost = speed * (curve(tokens) + extra), where extra = a * context + b * tokens / batch * context + c * (batch - 1)
    and `context` counts the KV slots of all `batch` sequences. A Kalman filter follows a, b and c, which are never
    negative: a start on a busy machine may have measured any of them wrong. `speed` follows the machine as a whole, so
    that a busy minute measured at one size does not make the other sizes look cheap.
    """

    def __init__(self) -> None:
        self._speed = 1.0
        self._wait = FIRST_TRIAL
        self._plain = True  # whether the last forward had one token for each sequence
        self._alike = 0  # such forwards, or others, in a row
        self._trials = self._counted = 0
        self.calibrate([(1, 0, GUESS_SECONDS)])
        self._measured = False

    def calibrate(self, samples: Sequence[tuple[int, int, float]], batches: Sequence[tuple[int, float]] = ()) -> None:
        """Start from timed forwards (tokens, context, seconds), at least one; replaces everything learned before.

        Samples with the shortest context give the curve, by each size's fastest; the others give the cost of context.
        `batches` are timed forwards (sequences, seconds) of one token for each of several sequences.
        """
        near = min(context for _, context, _ in samples)
        sizes = _fastest((tokens, seconds) for tokens, context, seconds in samples if context == near)
        self._curve = CostCurve(sizes.items())
        self._speed, self._measured = 1.0, True
        far = [(t, (seconds - self._base(t)) / (context - near)) for t, context, seconds in samples if context > near]
        per_context, per_token_context = _line(sorted(_fastest(far).items()))
        shares = [(seconds - self._base(count)) / (count - 1) for count, seconds in _fastest(batches).items()]
        per_sequence = max(0.0, sum(shares) / len(shares)) if shares else 0.0
        self._extra = [per_context, per_token_context, per_sequence]
        self._doubt = np.diag((TRUST * np.array(self._extra) + LIKELY_EXTRA * self._base(1)) ** 2)
        self._covariance = self._doubt.copy()

    def seconds(self, tokens: int, context: int = 0, batch: int = 1) -> float:
        """The estimated seconds of a forward of `tokens` tokens of `batch` sequences with `context` KV slots in all."""
        return float(self.many(np.array([tokens]), context, batch)[0])

    def many(self, tokens: Counts, context: int = 0, batch: int = 1) -> Floats:
        """`seconds` for each number of tokens."""
        return np.asarray(self._speed * (self._curve.many(tokens) + self._added(tokens, context, batch)))

    def observe(self, tokens: int, context: int, seconds: float, batch: int = 1) -> None:
        """Learn from one measured forward."""
        if not self._measured:
            self.calibrate([(tokens, context, seconds)])
        base = self._base(tokens)
        surprised = self._count(tokens == batch, seconds / self._speed / (base + self._added(tokens, context, batch)))
        self._learn_extra(tokens, context, batch, seconds / self._speed, base)
        added = self._added(tokens, context, batch)
        if self._curve.is_measured(tokens):  # else the estimate may be what is wrong, not the speed
            ratio = seconds / self._speed / (base + added)
            self._speed *= min(max(ratio, 1 / SPEED_CLIP), SPEED_CLIP) ** SPEED_RATE
        if (left := seconds / self._speed - added) >= LEAST_SHARE * base:  # else the extra is wrong, and learns of it
            self._curve.observe(tokens, left)
        if surprised:
            self._curve.doubt()

    def _learn_extra(self, tokens: int, context: int, batch: int, seconds: float, base: float) -> None:
        """One step of the filter. A forward counts as at most twice as long as expected."""
        if not context and batch == 1:
            return
        loads = np.array([context, context * tokens / batch, batch - 1.0])
        expected = base + self._added(tokens, context, batch)
        spread = self._covariance @ loads
        gain = spread / (loads @ spread + (CURVE_NOISE * expected) ** 2)
        self._extra = [max(0.0, one) for one in (self._extra + gain * min(seconds - expected, expected)).tolist()]
        self._covariance += FORGETTING * (self._doubt - self._covariance) - gain[:, None] * spread

    def next_trial(self) -> Literal["plain", "drafts"] | None:
        """The kind of forward, without drafts or with, that should come next since none came for long. A size that
        never comes would keep a wrong cost, such as one that was measured while the machine had other work.
        """
        if self._alike < self._wait:
            return None
        self._alike = 0  # also where the next forward cannot be one
        self._trials += 1
        return "drafts" if self._plain or self._trials % 2 else "plain"

    def _count(self, plain: bool, ratio: float) -> bool:
        """Count a forward that took `ratio` times as long as expected; returns whether it is the first of its kind, or
        a trial, and a surprise. Trials that find nothing new become rare.
        """
        if plain == self._plain and self._trials == self._counted:
            self._alike += 1
            return False
        surprise = not 1 / SURPRISE < ratio < SURPRISE
        self._wait = FIRST_TRIAL if surprise else min(2 * self._wait, LAST_TRIAL)
        self._plain, self._alike, self._counted = plain, 0, self._trials
        return surprise

    def _added(self, tokens: Any, context: int, batch: int) -> Any:
        """The extra cost, a float or an array as `tokens` is."""
        slots, of_tokens, sequences = self._extra
        return (slots + of_tokens * tokens / batch) * context + sequences * (batch - 1)

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
