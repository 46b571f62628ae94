"""Traces of a strategy's decisions: one file for each answer, in a folder that the operator sets. Off by default.

Traces hold prompts and thinking: only the folder's owner may read them, requests with `store` off leave no trace, and
only the newest traces are stored.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentspec.errors import ConfigurationError
from agentspec.reasoning.delegation.steps import Step
from agentspec.reasoning.settings import TraceSettings

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

    def write(self, trace: str, records: list[dict[str, Any]]) -> None:
        """Write a trace and delete the oldest ones. If writing fails, the trace is lost and the answer is not."""
        text = "".join(json.dumps(record, ensure_ascii=False, default=repr) + "\n" for record in records)
        path = self.path / f"{trace}{SUFFIX}"
        try:
            path.touch(0o600)
            path.write_text(text, "utf-8", "replace")
            for old in self._newest_first()[KEPT:]:
                old.unlink(missing_ok=True)
        except OSError as error:
            with suppress(OSError):  # half of a trace could not be read
                path.unlink()
            logger.warning("a trace was not written: %s", error.strerror)

    def _newest_first(self) -> list[Path]:
        written: dict[Path, float] = {}
        for file in self.path.glob(f"*{SUFFIX}"):
            with suppress(FileNotFoundError):  # another process deletes, too
                written[file] = file.stat().st_mtime
        return sorted(written, key=written.__getitem__, reverse=True)


@dataclass(slots=True)
class Trace:
    """The decisions made for one answer, which `write` stores in `folder`. Without a folder nothing is recorded."""

    folder: TraceFolder | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:16])
    _records: list[dict[str, Any]] = field(default_factory=list)
    _began: float = field(default_factory=time.perf_counter)

    def add(self, event: str, **fields: Any) -> None:
        if self.folder is not None:
            seconds = round(time.perf_counter() - self._began, 6)
            self._records.append({"event": event, "at": seconds, **{name: _plain(one) for name, one in fields.items()}})

    def write(self, head: Mapping[str, Any], answer: str) -> None:
        """Write `head`, the decisions and the text of the answer, which has ended. Idempotent."""
        folder, self.folder = self.folder, None
        if folder is not None:
            seconds = round(time.perf_counter() - self._began, 6)
            ended = {"event": "answer", "at": seconds, "text": answer}
            folder.write(self.id, [{"event": "head", "trace": self.id, **head}, *self._records, ended])


def _plain(value: Any) -> Any:
    if not isinstance(value, Step):
        return value
    return {name: one for name, one in asdict(value).items() if name != "token_ids"}
