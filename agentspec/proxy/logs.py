"""Structured logs on the logger `agentspec.proxy`: after `configure`, each event is one line with a JSON object.

Fields never hold a body, a header or a key, and of an exception only its class and frames.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections import deque
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any, TextIO, cast

from agentspec.telemetry.safe_errors import class_of, frames_of

BATCH_SECONDS = 0.02  # lines that come within this time are written together
MAX_WAITING = 65_536  # lines; further ones are dropped and counted while no reader takes what is written
STUCK_SECONDS = 2.0
_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR)
_encode = json.JSONEncoder(default=repr).encode


class LoggedEvent(dict[str, Any]):
    """The fields of an event, with its name as `event`."""


class EventLogger:
    """Logs events with fields, at a small part of the cost of a `logging.Logger`, which looks for its caller."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self.info, self.warning, self.error = (partial(self.log, level) for level in _LEVELS)

    def log(self, level: int, event: str, **fields: Any) -> None:
        if self._logger.isEnabledFor(level):
            message = LoggedEvent(fields, event=event)
            self._logger.handle(logging.LogRecord(self._logger.name, level, "", 0, message, None, None))


logger = EventLogger("agentspec.proxy")


class JsonFormatter(logging.Formatter):
    """Formats any record as a JSON object: class and frames in place of a traceback, which would end with a message."""

    def format(self, record: logging.LogRecord) -> str:
        message = cast(object, record.msg)
        line: dict[str, Any]
        line = dict(message) if isinstance(message, LoggedEvent) else {"event": _message(record), "logger": record.name}
        line["level"] = record.levelname.lower()
        second = int(record.created)
        line["timestamp"] = f"{_clock(second)}.{int((record.created - second) * 1e6):06d}Z"
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            line.update(exception=class_of(error), frames=frames_of(error))
        return _encode(line)


class SentenceFormatter(logging.Formatter):
    """Formats any record for a person at a terminal: a sentence where there is one, else the event and its fields."""

    def format(self, record: logging.LogRecord) -> str:
        message = cast(object, record.msg)
        text = _sentence(message) if isinstance(message, LoggedEvent) else _message(record)
        text = text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"
        error = record.exc_info[1] if record.exc_info else None
        return text if error is None else f"{text} ({class_of(error)})"


def _sentence(event: LoggedEvent) -> str:
    known = {name: value for name, value in event.items() if name != "event" and value is not None}
    if (sentence := _SENTENCES.get(event["event"])) is not None:
        page = f"; open {known['page']}" if "page" in known else ""
        return sentence.format(**known | {"models": ", ".join(event["models"]) or "any model", "page": page})
    rest = ", ".join(f"{name}={value}" for name, value in known.items())
    return f"{event['event']}: {rest}" if rest else str(event["event"])


_SENTENCES = {
    "loading": "loading {models}",
    "ready": "ready after {seconds} s: {url} answers for {models}{page}",
}


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # arguments that do not fit: whoever logs goes on, as everywhere in `logging`
        return str(record.msg)


@lru_cache(maxsize=4)
def _clock(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


class BackgroundHandler(logging.StreamHandler[TextIO]):
    """Writes lines in batches from a thread, so that a slow reader of the log holds up no request; `flush`, which also
    runs when the interpreter exits, writes what waits.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._waiting: deque[str] = deque()
        self._dropped = 0
        self._wake = threading.Event()
        self._writing = threading.Lock()
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._dropped += 1
            return
        self._waiting.append(self.format(record) + self.terminator)
        if not self._wake.is_set():
            self._wake.set()
            if self._thread is None or not self._thread.is_alive():  # the first line of this process
                self._thread = threading.Thread(target=self._write_batches, name="agentspec-log", daemon=True)
                self._thread.start()

    def flush(self) -> None:
        if not self._writing.acquire(timeout=STUCK_SECONDS):
            return
        try:
            lines = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                lines.append(_encode({"event": "log lines dropped", "count": dropped, "level": "warning"}) + "\n")
            self.stream.write("".join(lines))
            self.stream.flush()
        finally:
            self._writing.release()

    def _write_batches(self) -> None:
        pause = threading.Event()
        while True:
            self._wake.wait()
            pause.wait(BATCH_SECONDS)
            self._wake.clear()
            try:
                self.flush()
            except (OSError, ValueError):  # the log's reader has gone
                return


def configure(level: str = "INFO", stream: TextIO | None = None, *, background: bool = False) -> None:
    """Write the process's log records from `level` on to `stream` (stderr), as JSON or to a terminal as sentences; the
    HTTP client's from WARNING.

    `background`: write from a thread, as a server does that must not wait for its log.
    """
    given = stream or sys.stderr
    handler = BackgroundHandler(given) if background else logging.StreamHandler(given)
    handler.setFormatter(SentenceFormatter() if given.isatty() else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in ("httpx", "httpx2", "httpcore", "httpcore2"):  # at INFO and DEBUG they log addresses and headers
        logging.getLogger(name).setLevel(logging.WARNING)
