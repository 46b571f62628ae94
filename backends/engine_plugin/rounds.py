"""What the drafters of all engines do each round: search for all requests in the time that there is, count it, and
keep failures of our code away from the engine that it runs in.

The process that drafts is not the one that serves the metrics: they are seen where Prometheus's client collects those
of several processes (PROMETHEUS_MULTIPROC_DIR).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from time import monotonic, perf_counter
from typing import Any

from prometheus_client import Counter, Gauge

from agentspec.cache.index import DraftJob, propose_batch
from agentspec.telemetry.safe_errors import safe_message
from agentspec.types import Draft

FAILURE_SECONDS = 60.0  # between two warnings of the same kind
_METRICS: dict[str, tuple[type[Counter | Gauge], str, tuple[str, ...]]] = {
    "searches": (Counter, "Searches for drafts, done or missed for want of time", ("outcome",)),
    "seconds": (Counter, "Seconds of the engine's thread spent on drafting", ()),
    "empty_rows": (Counter, "Requests in rounds that got no draft", ()),
    "draft_tokens": (Counter, "Tokens drafted", ("source", "tenant")),
    "accepted_tokens": (Counter, "Drafted tokens that were accepted", ("source", "tenant")),
    "failures": (Counter, "Failures, by what each of them costs", ("cost",)),
    "dropped_requests": (Counter, "Requests without a cache because too many tokens waited to be recorded", ()),
    "queued_tokens": (Gauge, "Tokens that wait to be recorded", ()),
    "cache_bytes": (Gauge, "Bytes of the cache in memory", ()),
}


@cache
def metric(name: str) -> Any:
    """The counter or gauge `agentspec_drafter_NAME` of the table. Gauges of several processes are added up."""
    kind, text, labels = _METRICS[name]
    options: Any = {"multiprocess_mode": "livesum"} if kind is Gauge else {}
    return kind(f"agentspec_drafter_{name}", text, labels, **options)


class FailureLog:
    """Counts failures, and warns of them and of what they cost, at most once in `FAILURE_SECONDS`."""

    def __init__(self, logger: logging.Logger, cost: str) -> None:
        self._logger, self._cost = logger, cost
        self._failures, self._due = 0, 0.0

    def report(self, error: Exception) -> None:
        self._failures += 1
        metric("failures").labels(self._cost).inc()
        if monotonic() >= self._due:
            self._due = monotonic() + FAILURE_SECONDS
            self._logger.warning("agentspec: %s (failure %d): %s", self._cost, self._failures, safe_message(error))

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Report what is raised within."""
        try:
            yield
        except Exception as error:
            self.report(error)


class RoundStats:
    """Counts rounds and searches."""

    def __init__(self) -> None:
        self._seconds, self._empty = metric("seconds"), metric("empty_rows")
        self._done, self._missed = (metric("searches").labels(outcome) for outcome in ("done", "missed"))

    def add(self, seconds: float, drafted: Sequence[int]) -> None:
        """Count a round that took so long and drafted so many tokens for each request."""
        self._seconds.inc(seconds)
        if empty := drafted.count(0):
            self._empty.inc(empty)

    def searched(self, count: int, missed: int) -> None:
        """Count the searches of a round, and those of them that had no time."""
        self._done.inc(count - missed)
        if missed:
            self._missed.inc(missed)


class RoundSearch:
    """Searches for the rows of each round with one deadline for all of them, and counts the searches in `stats`.

    A round begins behind the last row that had time in the round before.
    """

    def __init__(self, stats: RoundStats) -> None:
        self._first = 0
        self._stats = stats
        self.late = False  # the last round had no time for all

    def search(self, jobs: Sequence[DraftJob | None], patience: float) -> list[Draft | None]:
        """What follows each row's text; None for a row without a job, and for one that had no time."""
        asked = [(row, job) for row, job in enumerate(jobs) if job is not None]
        first = self._first % max(1, len(asked))
        asked = asked[first:] + asked[:first]
        found: list[Draft | None] = [None] * len(jobs)
        until = perf_counter() + patience
        drafts = propose_batch([job for _, job in asked], patience) if asked else []
        self.late = bool(asked) and perf_counter() >= until
        for (row, _), draft in zip(asked, drafts, strict=True):
            found[row] = None if self.late and not len(draft.tokens) else draft
        done = sum(found[row] is not None for row, _ in asked)
        self._first = first + done
        self._stats.searched(len(asked), missed=len(asked) - done)
        return found
