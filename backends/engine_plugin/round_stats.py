"""Counts what a server's drafter does, and logs it while there is work.

The process that drafts is not the one that serves the metrics: the counter is seen where Prometheus's client collects
those of several processes (PROMETHEUS_MULTIPROC_DIR).
"""

from __future__ import annotations

import logging
from functools import cache
from time import monotonic

from prometheus_client import Counter

LOG_SECONDS = 10.0  # the interval at which vLLM logs its own figures

logger = logging.getLogger(__name__)


class RoundStats:
    """Counts rounds, drafted and accepted tokens, and logs them every `LOG_SECONDS` while there are rounds."""

    def __init__(self) -> None:
        self.accepted = 0
        self._missed = 0
        self.last_seconds = 0.0
        self._seconds: list[float] = []
        self._drafted = 0
        self._logged = monotonic()

    def add(self, seconds: float, drafted: int) -> None:
        self.last_seconds = seconds
        self._seconds.append(seconds)
        self._drafted += drafted
        if monotonic() - self._logged >= LOG_SECONDS:
            self.log()

    def searched(self, count: int, missed: int) -> None:
        """Count the searches of a round, and those of them that had no time."""
        self._missed += missed
        _searches().labels("done").inc(count - missed)
        _searches().labels("missed").inc(missed)

    def log(self) -> None:
        """Log the counts since the last call, and reset them."""
        if self._seconds:
            ordered = sorted(self._seconds)
            logger.info(
                "agentspec: %d rounds, drafting %.3f ms (median), %.3f ms (longest), %d tokens drafted, %d accepted,"
                " %d searches had no time",
                len(ordered),
                1e3 * ordered[len(ordered) // 2],
                1e3 * ordered[-1],
                self._drafted,
                self.accepted,
                self._missed,
            )
        self._logged = monotonic()
        self._seconds, self._drafted, self.accepted, self._missed = [], 0, 0, 0


@cache
def _searches() -> Counter:
    return Counter("agentspec_drafter_searches", "Searches for drafts, done or missed for want of time", ["outcome"])
