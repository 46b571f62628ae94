"""Structured logs on the logger `agentspec.proxy`: after `configure`, each event is one line with a JSON object.

Fields never hold a body, a header or a key, and of an exception only its class and frames.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog

from agentspec.telemetry.safe_errors import class_of, frames_of

logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
    logging.getLogger("agentspec.proxy"),
    processors=[structlog.stdlib.filter_by_level, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
    wrapper_class=structlog.stdlib.BoundLogger,
)


def configure(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Write the process's log records from `level` on to `stream` (stderr) as JSON; the HTTP client's from WARNING."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *shared,
            _place_only,
            structlog.processors.JSONRenderer(),
        ],
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in ("httpx", "httpx2", "httpcore", "httpcore2"):  # at INFO and DEBUG they log addresses and headers
        logging.getLogger(name).setLevel(logging.WARNING)


def _place_only(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Log class and frames in place of a traceback, which would end with the exception's message."""
    given = event.pop("exc_info", None)
    error = given[1] if isinstance(given, tuple) else given
    if isinstance(error, BaseException):
        event.update(exception=class_of(error), frames=frames_of(error))
    return event
