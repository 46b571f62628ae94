"""Traces of a strategy's decisions: one file for each answer, in a folder that the operator sets. Off by default.

Traces hold prompts and thinking: only the folder's owner may read them, requests with `store` off leave no trace, and
only the newest traces are kept.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentspec.errors import ConfigurationError
from agentspec.reasoning.delegation.steps import Event, ThinkingText
from agentspec.reasoning.settings import StrategySettings, TraceSettings
from agentspec.types import GenerateRequest

SUFFIX = ".jsonl"
KEPT = 200  # newest traces of the folder
logger = logging.getLogger(__name__)


def open_folder(settings: TraceSettings) -> TraceFolder | None:
    """Open or create the folder; None if traces are off. Raises `ConfigurationError` if it cannot be created."""
    if settings.path is None:
        return None
    folder = settings.path.expanduser()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"traces.path {str(folder)!r}: {error.strerror}") from None
    return TraceFolder(folder)


@dataclass(frozen=True, slots=True)
class TraceFolder:
    """The traces in one folder, by id; the folder holds at most `KEPT` of them."""

    path: Path

    def ids(self) -> list[str]:
        """The ids of all traces, newest first."""
        written: dict[str, float] = {}
        for file in self.path.glob(f"*{SUFFIX}"):
            with suppress(FileNotFoundError):  # another process deletes, too
                written[file.stem] = file.stat().st_mtime
        return sorted(written, key=written.__getitem__, reverse=True)

    def write(self, trace: str, records: list[dict[str, Any]]) -> None:
        """Write a trace and delete the oldest ones. If writing fails, the trace is lost and the answer is not."""
        text = "".join(json.dumps(record, ensure_ascii=False, default=repr) + "\n" for record in records)
        try:
            self._create(self.path / f"{trace}{SUFFIX}", text)
            for old in self.ids()[KEPT:]:
                (self.path / f"{old}{SUFFIX}").unlink(missing_ok=True)
        except OSError as error:
            logger.warning("a trace was not kept: %s", error.strerror)

    def _create(self, path: Path, text: str) -> None:
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(opened, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
        except OSError:
            path.unlink(missing_ok=True)  # half of a trace could not be read
            raise


@dataclass(slots=True)
class Tracer:
    """Collects the events of one answer and writes them when the answer ends, finished or aborted."""

    folder: TraceFolder | None
    id: str
    model: str
    settings: StrategySettings
    request: GenerateRequest
    _records: list[dict[str, Any]] = field(default_factory=list)
    _answer: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.perf_counter)
    _closed: bool = False

    @property
    def kept(self) -> bool:
        return self.folder is not None

    def add(self, event: Event) -> None:
        if self.folder is None or isinstance(event, ThinkingText):
            return
        seconds = round(time.perf_counter() - self._began, 6)
        self._records.append({"event": type(event).__name__.lower(), "at": seconds, **_plain(event)})

    def add_answer(self, text: str) -> None:
        if self.folder is not None:
            self._answer.append(text)

    def close(self) -> None:
        """Write the trace. Idempotent."""
        if self.folder is None or self._closed:
            return
        self._closed = True
        self.folder.write(self.id, list(self._all_records()))

    def _all_records(self) -> Iterator[dict[str, Any]]:
        yield {
            "event": "head",
            "trace": self.id,
            "model": self.model,
            "strategy": self.settings.strategy,
            "knobs": self.settings.answer_settings,
            "messages": [dict(message) for message in self.request.messages or ()],
        }
        yield from self._records
        seconds = round(time.perf_counter() - self._began, 6)
        yield {"event": "answer", "at": seconds, "text": "".join(self._answer)}


def _plain(event: Event) -> dict[str, Any]:
    record = asdict(event)
    for name in ("step", "rejected"):
        if name in record:
            record[name].pop("token_ids")
    return record
