"""Failures of predicting and starting early, which no agent is to notice."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)

_told: set[tuple[str, type[Exception]]] = set()


@contextmanager
def kept_from_agent(doing: str) -> Iterator[None]:
    """What fails inside ends there: the agent goes on. The first failure of a kind is logged with its traceback."""
    try:
        yield
    except Exception as error:
        if (doing, type(error)) not in _told:
            _told.add((doing, type(error)))
            _log.exception("%s failed; the agent goes on without it", doing)
