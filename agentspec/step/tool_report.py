"""Counts what tools that were started early have saved, for `agentspec.report()`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_MOST = 1024  # tools with a row of their own
_OTHER = "(other)"
_COUNTED = {
    "call": "calls",
    "launch": "launches",
    "hit": "hits",
    "waste": "wasted",
    "stale": "stale",
    "failed": "failed",
}


@dataclass(frozen=True, slots=True)
class ToolRow:
    """The totals of one tool: the model's calls, how many of them were answered by an early start, and seconds.

    `launches` are early starts; each ends as one of `hits`, `wasted` (no call came), `stale` (something may have
    changed since) and `failed`. `wasted_seconds` is the time that tools ran for nothing.
    """

    tool: str
    calls: int = 0
    launches: int = 0
    hits: int = 0
    wasted: int = 0
    stale: int = 0
    failed: int = 0
    seconds_saved: float = 0.0
    wasted_seconds: float = 0.0


class ToolStatistics:
    """Adds up by tool. Thread-safe."""

    def __init__(self) -> None:
        self._rows: dict[str, ToolRow] = {}
        self._lock = threading.Lock()

    def add(self, tool: str, what: str, seconds: float) -> None:
        """Count one `call`, `launch`, `hit`, `waste`, `stale` or `failed`; the seconds are those saved by a hit."""
        with self._lock:
            name = tool if tool in self._rows or len(self._rows) < _MOST else _OTHER
            row = self._rows.get(name, ToolRow(name))
            time = "seconds_saved" if what == "hit" else "wasted_seconds"
            counted = _COUNTED[what]
            changes = {counted: getattr(row, counted) + 1, time: getattr(row, time) + seconds}
            self._rows[name] = replace(row, **changes)

    def rows(self) -> tuple[ToolRow, ...]:
        """The current rows, in the order in which the tools were first seen."""
        with self._lock:
            return tuple(self._rows.values())

    def reset(self) -> None:
        """Delete all counts."""
        with self._lock:
            self._rows.clear()


statistics = ToolStatistics()
"""Those of the process."""


def tool_table(rows: Sequence[ToolRow]) -> Table:
    """The rows as a table for `rich`."""
    from rich.table import Table

    table = Table(title="agentspec: tools started early")
    for column in fields(ToolRow):
        table.add_column(column.name.replace("_", " "), justify="left" if column.name == "tool" else "right")
    for row in rows:
        table.add_row(*(cell(getattr(row, column.name)) for column in fields(row)))
    return table


def cell(value: str | float) -> Text:
    """A value as tables show it. A name is no markup; half a surrogate pair in it, which UTF-8 cannot encode, becomes a
    question mark.
    """
    from rich.text import Text

    return Text((f"{value:.2f}" if isinstance(value, float) else str(value)).encode("utf-8", "replace").decode())
