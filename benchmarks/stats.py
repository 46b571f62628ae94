"""Ratios of paired measurements with a bootstrap interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

T = TypeVar("T")

RESAMPLES = 10_000
MIN_PAIRS = 7


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of paired ratios with the bounds of its 95 % interval, over `pairs` pairs."""

    median: float
    low: float
    high: float
    pairs: int

    def verdict(self, least: float) -> str:
        """met: the whole interval lies at or above the goal; missed: all of it below; else undecided."""
        if self.low >= least:
            return "met"
        return "missed" if self.high < least else "undecided"

    def __str__(self) -> str:
        return f"{self.median:.2f}x [{self.low:.2f}, {self.high:.2f}]"


def paired_ratio(values: Sequence[float], baseline: Sequence[float], *, seed: int = 0) -> Ratio:
    """Median of `values[i] / baseline[i]`, with a percentile bootstrap over the pairs (Efron 1979).

    Raises ValueError for sequences of different length or of fewer than seven pairs: fewer say nothing.
    """
    if len(values) != len(baseline) or len(values) < MIN_PAIRS:
        raise ValueError(f"need two equally long sequences of at least {MIN_PAIRS}: {len(values)}, {len(baseline)}")
    ratios = np.asarray(values, dtype=np.float64) / np.asarray(baseline, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(ratios), size=(RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[picks], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high), len(ratios))


def distinct_ngrams(tokens: Sequence[int], n: int = 4) -> float:
    """Share of the n-grams of `tokens` that are distinct: 1.0 where nothing repeats."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def rotated(items: Mapping[str, T], by: int) -> list[tuple[str, T]]:
    """The items in an order that begins with another one each time, so that none is always first."""
    listed = list(items.items())
    start = by % len(listed)
    return listed[start:] + listed[:start]
