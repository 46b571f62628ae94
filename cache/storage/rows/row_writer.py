"""Writes rows, but those that the database refuses."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from agentspec.cache.storage.database import Database, reason

_log = logging.getLogger(__name__)


class RowWriter:
    """Executes statements for rows of a database. A row that it never takes is left out, and holds up no other; the
    first is logged. `what` the rows are is for that message.
    """

    def __init__(self, database: Database, what: str) -> None:
        self._database = database
        self._what = what
        self._told = False

    def execute(self, connection: sa.Connection, statement: sa.Executable, rows: Sequence[Mapping[str, Any]]) -> int:
        """Execute a statement for each of the rows, in the caller's transaction; returns how many are left out."""
        if not rows:
            return 0
        part = connection.begin_nested()
        try:
            connection.execute(statement, rows)
        except Exception as error:
            if not self._database.is_refusal(error):
                raise  # and end the caller's transaction: SQLite may have ended it, and `part` with it
            part.rollback()
            if len(rows) == 1:
                self._tell(error)
                return 1
        else:
            part.commit()
            return 0
        half = len(rows) // 2
        return self.execute(connection, statement, rows[:half]) + self.execute(connection, statement, rows[half:])

    def _tell(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            message = "%s refuses some of %s, which is left out; are its names too long? %s"
            _log.warning(message, self._database.name, self._what, reason(error))
