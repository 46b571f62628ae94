"""Finds the servers of a pool that fail far more often than the others, though never often enough in a row."""

from __future__ import annotations

from collections.abc import Mapping

SWEEP_SECONDS = 10.0
MIN_CALLS = 10  # of a server in this time, fewer tell nothing
MARGIN = 0.2  # of all calls
MAX_SECONDS = 300.0


def outliers(counts: Mapping[str, tuple[int, int]]) -> list[str]:
    """The names of those that stand out, given each one's (calls, failures): the worst first.

    A server is one if its failures are more than those of all others together by `MARGIN` of its calls. Envoy's
    outlier detection compares with the mean less 1.9 standard deviations, which two or three servers cannot reach.
    """
    calls = sum(one for one, _ in counts.values())
    failures = sum(failed for _, failed in counts.values())
    excess: dict[str, float] = {}
    for name, (own, failed) in counts.items():
        others = calls - own
        if own >= MIN_CALLS and others >= MIN_CALLS:
            excess[name] = failed / own - (failures - failed) / others
    return sorted((name for name in excess if excess[name] > MARGIN), key=lambda name: -excess[name])


def ejection_time(seconds: float, times: int) -> float:
    """How long a server is left out that was so `times` before: Envoy's base time, longer each time."""
    return min(seconds * (times + 1), MAX_SECONDS)
