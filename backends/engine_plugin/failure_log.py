"""Keeps failures of our code away from the engine that it runs in."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from agentspec.telemetry.safe_errors import safe_message


class FailureLog:
    """Says once, as a warning, that something failed and what that costs; of later failures only for debugging."""

    def __init__(self, logger: logging.Logger, cost: str) -> None:
        self._logger, self._cost = logger, cost
        self._failed = False

    def report(self, error: Exception) -> None:
        level = logging.DEBUG if self._failed else logging.WARNING
        self._failed = True
        self._logger.log(level, "agentspec: %s: %s", self._cost, safe_message(error))

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Report what is raised within."""
        try:
            yield
        except Exception as error:
            self.report(error)
