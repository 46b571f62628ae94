"""Finds rows in the database and deletes them, with a log entry that tells other processes."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any

import sqlalchemy as sa

from agentspec.cache.deletion import Scope, Selection
from agentspec.cache.storage.schema import Kinds, deletions, is_older, is_sound, sequences

_KEPT = 1000  # deletions that the log lists one by one
_KINDS: Kinds = (
    *((name, str | None) for name in ("tenant", "session")),
    ("before", float | int | None),
)


class KnownDeletions:
    """Which deletion was the last that this process knew of, at any time since it opened the database.

    It counts seconds by a clock that cannot be set.
    """

    def __init__(self, number: int = 0) -> None:
        self._noted = deque([(-math.inf, number)], maxlen=_KEPT)

    @property
    def last(self) -> int:
        return self._noted[-1][1]

    def note(self, number: int) -> None:
        if number > self.last:
            self._noted.append((time.monotonic(), number))

    def known(self, time_: float) -> int:
        """The last deletion that was known at a time, in seconds since 1970 by the clock as it is now."""
        until = time.monotonic() - max(0.0, time.time() - time_)
        return next((number for at, number in reversed(self._noted) if at <= until), 0)


def last(connection: sa.Connection) -> int:
    return int(connection.execute(sa.select(sa.func.max(deletions.c.id))).scalar() or 0)


def since(connection: sa.Connection, number: int) -> list[tuple[int, Scope]]:
    query = sa.select(deletions).where(deletions.c.id > number).order_by(deletions.c.id)
    return [(row.id, _scope(row)) for row in connection.execute(query)]


def _scope(row: sa.Row[Any]) -> Scope:
    """What a deletion covers; everything where that is damaged: more is looked at then, and nothing of it is kept."""
    if not is_sound(row, _KINDS):
        return Scope()
    return Scope(row.tenant, row.session, row.before)


def conditions(selection: Selection, table: sa.Table = sequences) -> list[sa.ColumnElement[bool]]:
    """What holds for the rows of a selection."""
    wanted = ((table.c.tenant, selection.tenant), (table.c.session, selection.session))
    named = [column == value for column, value in wanted if value is not None]
    return named if selection.before is None else [*named, is_older(table.c.created_at, selection.before)]


def log(connection: sa.Connection, scope: Scope) -> int:
    """Note a deletion, for other processes; returns its number."""
    logged = connection.execute(
        deletions.insert().values(
            created_at=time.time(),
            tenant=scope.tenant,
            session=scope.session,
            before=scope.before,
        )
    )
    assert logged.inserted_primary_key is not None
    number = int(logged.inserted_primary_key[0])
    _prune(connection, number - _KEPT)
    return number


def _prune(connection: sa.Connection, until: int) -> None:
    """Make one deletion, of anything, of those up to `until`, for processes that have not looked for so long."""
    newest = connection.execute(sa.select(sa.func.max(deletions.c.id)).where(deletions.c.id <= until)).scalar()
    if newest is not None:
        anything = {"tenant": None, "session": None, "before": None}
        connection.execute(deletions.delete().where(deletions.c.id < newest))
        connection.execute(deletions.update().where(deletions.c.id == newest).values(anything))
