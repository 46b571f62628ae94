"""What drafting costs a server and brings it, for its log."""

from __future__ import annotations

import logging
import time

LOG_SECONDS = 10.0  # as often as vLLM logs its own figures

logger = logging.getLogger(__name__)


class RoundStats:
    """Counts of rounds; logs them now and then while there are any."""

    def __init__(self) -> None:
        self.accepted = 0
        self.last_seconds = 0.0
        self._seconds: list[float] = []
        self._drafted = 0
        self._logged = time.monotonic()

    def add(self, seconds: float, drafted: int) -> None:
        self.last_seconds = seconds
        self._seconds.append(seconds)
        self._drafted += drafted
        if time.monotonic() - self._logged >= LOG_SECONDS:
            self.log()

    def log(self) -> None:
        """Say what happened since the last time, and begin anew."""
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
        self._logged = time.monotonic()
        self._seconds, self._drafted, self.accepted = [], 0, 0
