"""How much to propose next: the number of drafted tokens with the most expected progress per second.

Goodput as in TurboSpec (Liu et al. 2024): expected tokens of a round divided by its cost, with the cost of verifying
fitted online and the acceptance of each drafter calibrated by what happened. Zero is an answer, so that text which
cannot be predicted is generated as if nothing had been proposed.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)
GUESS_SECONDS = 0.03  # a one-token forward, until one was measured
PRIOR_RISE = 0.02  # cost of one more token, in one-token forwards, until it was measured
SPEED_RATE = 0.2  # how fast the machine's overall speed is followed
SPEED_CLIP = 4.0  # one round tells at most this factor
SHAPE_RATE = 0.03  # how fast the curve itself is, once there is evidence
CALIBRATION_WEIGHT = 6  # measured rounds that a calibrated size counts for
SHAPE_CLIP = 0.5  # one round tells at most this share

EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95)
PRIOR = 6.0  # observations that a drafter's own probability counts for
PACE_FADE = 0.9  # per round of one request: its record is short, since texts change from one passage to the next
LONGEST_PAUSE = 16  # rounds without asking, at most
FADE = 0.995  # per round: what was learned is forgotten, so that a source which was wrong is tried again


class CostModel:
    """Seconds of one forward as a function of its tokens and of the rows it reads, learned from what was measured.

    cost = speed * (shape(tokens) + (slope + tilt * tokens) * context): `shape` is piecewise linear over `KNOTS` and
    never falls (pool adjacent violators); `speed` follows the machine as a whole, so that a busy minute seen at one
    size does not make the other sizes look cheap.
    """

    def __init__(self) -> None:
        self._shape: dict[int, float] = {}
        self._visits: dict[int, int] = {}
        self._curve: list[tuple[int, float]] = []
        self._slope = 0.0
        self._tilt = 0.0
        self._speed = 1.0
        self.calibrate([(1, 0, GUESS_SECONDS)])
        self._measured = False

    def calibrate(self, samples: Sequence[tuple[int, int, float]]) -> None:
        """Start from timed forwards (tokens, context, seconds), at least one; replaces what was known.

        Samples with the shortest context give the curve, each size by its fastest; the others what context adds.
        """
        near = min(context for _, context, _ in samples)
        self._shape = _fastest([(tokens, seconds) for tokens, context, seconds in samples if context == near])
        self._visits = dict.fromkeys(self._shape, CALIBRATION_WEIGHT)
        least, most = min(self._shape), max(self._shape)
        for knot in KNOTS:
            if not least <= knot <= most:
                edge = least if knot < least else most
                self._shape[knot] = self._shape[edge] * _prior(knot) / _prior(edge)
        self._speed, self._measured = 1.0, True
        self._refit()
        far = [(t, (seconds - self._base(t)) / (context - near)) for t, context, seconds in samples if context > near]
        self._slope, self._tilt = _line(sorted(_fastest(far).items()))

    def seconds(self, tokens: int, context: int = 0) -> float:
        """Estimated cost of one forward of `tokens` tokens over `context` earlier rows."""
        return self._speed * (self._base(tokens) + self._added(tokens, context))

    def observe(self, tokens: int, context: int, seconds: float) -> None:
        """Learn from one measured forward."""
        if not self._measured:
            self.calibrate([(tokens, context, seconds)])
        ratio = seconds / self.seconds(tokens, context)
        self._speed *= min(max(ratio, 1 / SPEED_CLIP), SPEED_CLIP) ** SPEED_RATE
        self._bend(tokens, context, seconds)

    def _added(self, tokens: int, context: int) -> float:
        return (self._slope + self._tilt * tokens) * context

    def _bend(self, tokens: int, context: int, seconds: float) -> None:
        """Move the nearest knot towards what this round would cost at the machine's present speed."""
        knot = min(KNOTS, key=lambda knot: abs(knot - tokens))
        known = self._shape.get(knot, self._base(knot))
        seen = seconds / self._speed - self._added(tokens, context) - self._base(tokens)
        visits = self._visits[knot] = self._visits.get(knot, 0) + 1
        limit = SHAPE_CLIP * known
        rate = max(SHAPE_RATE, 1 / (visits + 1)) if abs(seen) < limit else SHAPE_RATE
        self._shape[knot] = known + rate * min(max(seen, -limit), limit)
        self._refit()

    def _refit(self) -> None:
        """The closest non-decreasing curve: pool adjacent violators."""
        blocks: list[list[float]] = []
        knots = sorted(self._shape)
        for knot in knots:
            blocks.append([self._shape[knot], 1.0])
            while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
                value, weight = blocks.pop()
                total = blocks[-1][1] + weight
                blocks[-1] = [(blocks[-1][0] * blocks[-1][1] + value * weight) / total, total]
        values = [value for value, weight in blocks for _ in range(int(weight))]
        self._curve = list(zip(knots, values, strict=True))

    def _base(self, tokens: int) -> float:
        curve = self._curve
        at = min(max(bisect_left(curve, (tokens, -math.inf)), 1), len(curve) - 1)
        (x0, y0), (x1, y1) = curve[at - 1], curve[at]
        value = y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)
        return max(value, curve[0][1])

    def table(self) -> dict[int, float]:
        """Seconds per forward by number of tokens, without earlier rows."""
        return {knot: self.seconds(knot) for knot, _ in self._curve}


def _prior(tokens: int) -> float:
    return 1 + PRIOR_RISE * (tokens - 1)


def _fastest(pairs: Sequence[tuple[int, float]]) -> dict[int, float]:
    best: dict[int, float] = {}
    for key, value in pairs:
        best[key] = min(value, best.get(key, value))
    return best


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Intercept and rise, neither negative, of the line through the first and the last point; zeros without any."""
    if not points:
        return 0.0, 0.0
    (x0, y0), (x1, y1) = points[0], points[-1]
    rise = max(0.0, (y1 - y0) / (x1 - x0)) if x1 > x0 else 0.0
    return max(0.0, y0 - rise * x0), rise


class Calibration:
    """What a predicted probability is worth, per source and range of probability, from fading counts."""

    def __init__(self, fade: float = FADE) -> None:
        self._fade = fade
        self._bins: dict[tuple[int, int], list[float]] = {}

    def corrected(self, probability: float, source: int) -> float:
        """The probability to expect where a drafter says `probability`."""
        seen = self._bins.get((source, bisect_right(EDGES, probability)))
        if seen is None or seen[0] <= 0.0:
            return probability
        tried, hit, predicted = seen
        prior = PRIOR * predicted / tried
        return min(1.0, probability * (hit + prior) / (predicted + prior))

    def observe(self, probabilities: Sequence[float], sources: Sequence[int], accepted: Sequence[bool]) -> None:
        """Learn from the nodes of one verified draft."""
        for probability, source, hit in zip(probabilities, sources, accepted, strict=True):
            seen = self._bins.setdefault((source, bisect_right(EDGES, probability)), [0.0, 0.0, 0.0])
            seen[0] += 1.0
            seen[1] += hit
            seen[2] += probability

    def fade(self) -> None:
        """One round went by."""
        for seen in self._bins.values():
            seen[0] *= self._fade
            seen[1] *= self._fade
            seen[2] *= self._fade


@dataclass(slots=True)
class Pace:
    """One request's own record: how its drafts do compared with what was expected, and whether asking pays at all."""

    expected: float = 0.0
    accepted: float = 0.0
    balance: float = 0.0
    pause: int = 0
    skip: int = 0

    @property
    def factor(self) -> float:
        """Accepted over expected tokens, near 1 until there is evidence."""
        return (self.accepted + PRIOR / 2) / (self.expected + PRIOR / 2)

    def ask(self) -> bool:
        """Whether to ask the drafters this round; after proposals that did not pay, ever fewer rounds do."""
        self.skip -= 1
        return self.skip < 0

    def observe(self, expected: float, accepted: int, cost: float, saved: float) -> None:
        """One round asked: tokens expected and accepted, seconds beyond `FREE` spent asking, and seconds saved."""
        self.expected = self.expected * PACE_FADE + expected
        self.accepted = self.accepted * PACE_FADE + accepted
        self.balance = self.balance * PACE_FADE + saved - cost
        self.pause = min(max(1, 2 * self.pause), LONGEST_PAUSE) if self.balance < 0 else 0
        self.skip = self.pause


@dataclass(slots=True)
class Governor:
    """Chooses budgets for every request of one engine. Not thread-safe."""

    cost: CostModel = field(default_factory=CostModel)
    calibration: Calibration = field(default_factory=Calibration)

    def pace(self) -> Pace:
        """A record for one request."""
        return Pace()

    def choose(self, worth: Sequence[float], *, base: int = 1, context: int = 0) -> list[int]:
        """The draft nodes worth verifying, ascending; an ancestor of a chosen node is always chosen.

        `worth[i]` is the probability that node i is accepted, as `expectations` gives it; `base` is the number of
        tokens verified in any case, `context` the rows they read. Maximises expected tokens per second.
        """
        order = sorted(range(len(worth)), key=lambda node: (-worth[node], node))
        costs = [self.cost.seconds(base + count, context) for count in range(len(worth) + 1)]
        return sorted(order[: best_count([worth[node] for node in order], costs)])

    def expectations(
        self, probabilities: Sequence[float], parents: Sequence[int], sources: Sequence[int], pace: Pace | None = None
    ) -> list[float]:
        """The calibrated probability that each node of a draft is accepted; never above its parent's."""
        factor = 1.0 if pace is None else min(pace.factor, 1.0)
        worth: list[float] = []
        for probability, parent, source in zip(probabilities, parents, sources, strict=True):
            own = self.calibration.corrected(probability, source) * factor
            worth.append(min(own, worth[parent]) if parent >= 0 else own)
        return worth

    def observe(
        self,
        probabilities: Sequence[float],
        sources: Sequence[int],
        accepted: Sequence[bool],
        *,
        base: int = 1,
        context: int = 0,
        seconds: float,
    ) -> None:
        """Learn from one verified round: its nodes, and the time its forward took."""
        self.cost.observe(base + len(probabilities), context, seconds)
        self.calibration.fade()
        self.calibration.observe(probabilities, sources, accepted)


def best_count(worth: Sequence[float], costs: Sequence[float]) -> int:
    """The n that maximises (1 + worth[0] + ... + worth[n-1]) / costs[n]; the smallest of equals."""
    gain, best, best_rate = 1.0, 0, 1.0 / costs[0]
    for count, value in enumerate(worth, start=1):
        gain += value
        if gain / costs[count] > best_rate:
            best, best_rate = count, gain / costs[count]
    return best
