"""Reads the rows of `sequences` a piece at a time, and leaves out those that the database cannot give back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from agentspec.cache.storage.database import Database, reason
from agentspec.cache.storage.schema import damaged, sequences

PIECE = 256  # rows that are read at a time
_FASTER = 64  # the range of ids shrinks by this factor where rows cannot be read, and grows by it where they can
_MOST_LOST = 4096  # ids in a row that cannot be read: then the table itself is damaged


class RowPages:
    """The rows with `after` < id <= `until` that meet all `conditions`, in pieces: iterate over it.

    `lost` gets the id of every row that cannot be read, with the reason; from the first of them on rows are looked for
    without the other indexes, which may be what is damaged. Raises `DBAPIError` where the database does not answer,
    `CacheFormatError` where nothing can be read. No transaction stays open between two pieces.
    """

    def __init__(
        self,
        database: Database,
        conditions: Sequence[sa.ColumnElement[bool]],
        after: int,
        until: int,
        *,
        lost: Callable[[int, str], None],
        newest_first: bool = False,
        columns: Sequence[Any] = (sequences,),
        piece: int = PIECE,
    ) -> None:
        self._database = database
        self._conditions = conditions
        self._low, self._high = after, until
        self._lost = lost
        self._newest_first = newest_first
        self._columns = columns
        self._piece = piece
        self._by_index = True

    def __iter__(self) -> Iterator[Sequence[sa.Row[Any]]]:
        width, lost = self._high - self._low, 0
        while (width := min(width, self._high - self._low)) > 0:
            try:
                rows = self._read(width)
            except (exc.DBAPIError, ValueError, TypeError) as error:  # the last two: a value is not of its type
                if isinstance(error, exc.DBAPIError) and not self._database.is_damage(error):
                    raise
                if width == 1 and not self._by_index:
                    lost += 1
                    self._lose(error, lost)
                self._by_index, width = False, max(1, width // _FASTER)
                continue
            if rows:
                yield rows
            self._advance(rows, width)
            width, lost = width * _FASTER, 0

    def _read(self, width: int) -> Sequence[sa.Row[Any]]:
        low, high = (self._high - width, self._high) if self._newest_first else (self._low, self._low + width)
        id_ = sequences.c.id
        wanted = self._conditions
        if wanted and not self._by_index:
            wanted = [sa.case((sa.and_(*wanted), 1), else_=0) == 1]
        query = sa.select(*self._columns).where(*wanted, id_ > low, id_ <= high)
        order = id_.desc() if self._newest_first else id_
        with self._database.engine.connect() as connection:
            if not self._by_index:
                self._database.look_closely(connection)
            rows: Sequence[Any] = connection.execute(query.order_by(order).limit(self._piece)).all()
        return rows

    def _advance(self, rows: Sequence[sa.Row[Any]], width: int) -> None:
        full = len(rows) == self._piece
        if self._newest_first:
            self._high = rows[-1].id - 1 if full else self._high - width
        else:
            self._low = rows[-1].id if full else self._low + width

    def _lose(self, error: Exception, lost: int) -> None:
        if lost > _MOST_LOST:
            raise damaged(self._database.name, reason(error)) from error
        self._lost(self._high if self._newest_first else self._low + 1, reason(error))
        self._advance((), 1)
