"""What the drafters of all engines do each round: count it, and keep failures of our code away from the engine that it
runs in.

The process that drafts is not the one that serves the metrics: they are seen where Prometheus's client collects those
of several processes (PROMETHEUS_MULTIPROC_DIR).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from time import monotonic
from typing import Any

from prometheus_client import Counter, Gauge

from agentspec.telemetry.safe_errors import safe_message

FAILURE_SECONDS = 60.0  # between two warnings of the same kind
_METRICS: dict[str, tuple[type[Counter | Gauge], str, tuple[str, ...]]] = {
    "searches": (Counter, "Searches for drafts, done or missed for want of time", ("outcome",)),
    "seconds": (Counter, "Seconds spent on drafting: of the engine's thread, or of the search's", ()),
    "empty_rows": (Counter, "Requests in rounds, or searches, that got no draft", ()),
    "draft_tokens": (Counter, "Tokens drafted", ("source", "tenant")),
    "accepted_tokens": (Counter, "Drafted tokens that were accepted", ("source", "tenant")),
    "failures": (Counter, "Failures, by what each of them costs", ("cost",)),
    "dropped_requests": (Counter, "Requests without a cache because too many tokens waited to be recorded", ()),
    "queued_tokens": (Gauge, "Tokens that wait to be recorded", ()),
    "cache_bytes": (Gauge, "Bytes of the cache in memory", ()),
}


@cache
def metric(name: str, *labels: str) -> Any:
    """The counter or gauge `agentspec_drafter_NAME` of the table. Gauges of several processes are added up."""
    if labels:
        return metric(name).labels(*labels)
    kind, text, names = _METRICS[name]
    options: Any = {"multiprocess_mode": "livesum"} if kind is Gauge else {}
    return kind(f"agentspec_drafter_{name}", text, names, **options)


class FailureLog:
    """Counts failures, and warns of them and of what they cost, at most once in `FAILURE_SECONDS`."""

    def __init__(self, logger: logging.Logger, cost: str) -> None:
        self._logger, self._cost = logger, cost
        self._failures, self._due = 0, 0.0

    def report(self, error: Exception) -> None:
        self._failures += 1
        metric("failures", self._cost).inc()
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
