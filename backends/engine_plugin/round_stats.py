"""Counts what a server's drafter does, and logs it while there is work."""

from __future__ import annotations

import logging
from time import monotonic

LOG_SECONDS = 10.0  # the interval at which vLLM logs its own figures

logger = logging.getLogger(__name__)


class RoundStats:
    """Counts rounds, drafted and accepted tokens, and logs them every `LOG_SECONDS` while there are rounds."""

    def __init__(self) -> None:
        self.accepted = 0
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

    def log(self) -> None:
        """Log the counts since the last call, and reset them."""
        if self._seconds:
            ordered = sorted(self._seconds)
            logger.info(
                "agentspec: %d rounds, drafting %.3f ms (median), %.3f ms (longest), %d tokens drafted, %d accepted",
                len(ordered),
                1e3 * ordered[len(ordered) // 2],
                1e3 * ordered[-1],
                self._drafted,
                self.accepted,
            )
        self._logged = monotonic()
        self._seconds, self._drafted, self.accepted = [], 0, 0
