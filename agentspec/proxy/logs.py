"""Structured logs: events with fields on the logger `agentspec.proxy`, one JSON object a line once `configure` ran.

No body, header or key ever becomes a field.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog

logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
    logging.getLogger("agentspec.proxy"),
    processors=[structlog.stdlib.filter_by_level, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
    wrapper_class=structlog.stdlib.BoundLogger,
)


def configure(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send every log record of the process to `stream` (standard error) as JSON, the HTTP client's warnings only."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *shared,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in ("httpx", "httpcore"):  # they would write addresses and headers
        logging.getLogger(name).setLevel(logging.WARNING)
