"""Finds rows in the database and deletes them, with a log entry that tells other processes."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa

from agentspec.cache.deletion import Scope, Selection
from agentspec.cache.storage import codec, learned
from agentspec.cache.storage.schema import Kinds, damaged, deletions, is_older, is_sound, sequences
from agentspec.errors import CacheFormatError

_SOME = 500  # values in one statement
_KEPT = 1000  # deletions that the log lists one by one
_KINDS: Kinds = (
    *((name, str | None) for name in ("tenant", "session", "tokenizer")),
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
        return Scope(searched=True)
    return Scope(row.tenant, row.session, row.tokenizer, row.before, bool(row.searched))


def search(connection: sa.Connection, selection: Selection, after: int = 0) -> tuple[list[int], int]:
    """The ids of the rows beyond `after` that a selection matches, and the last row that was looked at."""
    ids: list[int] = []
    columns: Sequence[Any] = (sequences,) if selection.searched else (sequences.c.id,)
    query = sa.select(*columns).where(*_conditions(selection), sequences.c.id > after).order_by(sequences.c.id)
    last = after
    for row in connection.execute(query.execution_options(yield_per=256)):
        last = row.id
        if _holds(row, selection):
            ids.append(row.id)
    return ids, last


def _holds(row: sa.Row[Any], selection: Selection) -> bool:
    """Whether a row that meets the other conditions holds what is searched for; a damaged one is of no use and does."""
    if not selection.searched:
        return True
    try:
        record = codec.decode(row)
    except CacheFormatError:
        return True
    return selection.holds(np.concatenate((record.context, record.tokens)))


def _conditions(selection: Selection) -> list[sa.ColumnElement[bool]]:
    """What holds for the rows of a selection, but for what it searches their tokens for."""
    wanted = (
        (sequences.c.tenant, selection.tenant),
        (sequences.c.session, selection.session),
        (sequences.c.tokenizer_hash, selection.tokenizer),
    )
    named = [column == value for column, value in wanted if value is not None]
    return named if selection.before is None else [*named, is_older(sequences.c.created_at, selection.before)]


def delete(connection: sa.Connection, selection: Selection, found: tuple[list[int], int]) -> tuple[int, int]:
    """Delete the rows that `search` has `found`, and matching rows added since, in the caller's write transaction.

    Returns how many were deleted, and the number of the deletion.
    """
    ids, last = found
    chosen = sorted({*ids, *search(connection, selection, last)[0]})
    count = 0
    for start in range(0, len(chosen), _SOME):
        some = sequences.c.id.in_(chosen[start : start + _SOME])
        learned.forget(connection, some)
        count += connection.execute(sequences.delete().where(some)).rowcount
    if count < len(chosen) and search(connection, selection)[0]:  # not by another process before
        raise damaged("the table of sequences", "rows are not where they belong")
    return count, log(connection, selection.scope)


def log(connection: sa.Connection, scope: Scope) -> int:
    """Note a deletion, for other processes; returns its number."""
    logged = connection.execute(
        deletions.insert().values(
            created_at=time.time(),
            tenant=scope.tenant,
            session=scope.session,
            tokenizer=scope.tokenizer,
            before=scope.before,
            searched=scope.searched,
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
        anything = {"tenant": None, "session": None, "tokenizer": None, "before": None, "searched": True}
        connection.execute(deletions.delete().where(deletions.c.id < newest))
        connection.execute(deletions.update().where(deletions.c.id == newest).values(anything))
