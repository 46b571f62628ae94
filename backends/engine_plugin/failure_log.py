"""Keeps failures of our code away from the engine that it runs in."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from agentspec.telemetry.safe_errors import safe_message


class FailureLog:
    """Warns that something failed and what that costs: of the first failure, the tenth, the hundredth and so on."""

    def __init__(self, logger: logging.Logger, cost: str) -> None:
        self._logger, self._cost = logger, cost
        self.failures = 0

    def report(self, error: Exception) -> None:
        self.failures += 1
        level = logging.WARNING if re.fullmatch("10*", str(self.failures)) else logging.DEBUG
        self._logger.log(level, "agentspec: %s (failure %d): %s", self._cost, self.failures, safe_message(error))

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Report what is raised within."""
        try:
            yield
        except Exception as error:
            self.report(error)
