"""A table beside those of the sequences: made at first use, whatever their version, and erased as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import sqlalchemy as sa

from agentspec.cache.storage.database import FAILURES, Database, PendingErasure, reason
from agentspec.cache.storage.rows.row_writer import RowWriter
from agentspec.errors import CacheError, CacheUnavailableError

_IDS_AT_ONCE = 500  # in one statement


class SideTable:
    """Access to one table whose key is `id`. Failures of the database raise `CacheUnavailableError` that says `what`
    cannot be used.
    """

    def __init__(self, database: Database, table: sa.Table, what: str) -> None:
        self.database = database
        self._table = table
        self._what = what
        self._exists = False
        self._deletions = 0
        self.rows = RowWriter(database, what)
        self._erasure = PendingErasure(database)

    def is_there(self, connection: sa.Connection) -> bool:
        """Whether anything was ever stored."""
        if not self._exists and sa.inspect(connection).has_table(self._table.name):
            self._exists = True
            self.database.include(self._table.name)
        return self._exists

    def create(self, connection: sa.Connection) -> None:
        """Make the table unless it is there."""
        if not self.is_there(connection):
            self._table.create(connection)  # and no other one: `is_there` must not find what may be rolled back

    @contextmanager
    def reading(self) -> Iterator[sa.Connection | None]:
        """A connection; None if nothing was ever stored."""
        with self._named(), self.database.engine.connect() as connection:
            yield connection if self.is_there(connection) else None

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """A write transaction, committed at the end. A value that the database never takes raises `CacheError`."""
        before = self._deletions
        try:
            with self._named(), self.database.writing() as connection, self._taking():
                yield connection
        finally:
            if self._deletions != before:
                self._erasure.mark()

    @contextmanager
    def changing(self) -> Iterator[sa.Connection | None]:
        """A write transaction; None if nothing was ever stored."""
        with self.reading() as connection:
            there = connection is not None
        if not there:
            yield None
            return
        with self.writing() as changing:
            yield changing

    def in_batches(self, ids: Sequence[str]) -> Iterator[sa.ColumnElement[bool]]:
        """Conditions that hold for rows of these ids, each for as many as a statement takes."""
        for start in range(0, len(ids), _IDS_AT_ONCE):
            yield self._table.c.id.in_(ids[start : start + _IDS_AT_ONCE])

    def delete(self, connection: sa.Connection, ids: Sequence[str]) -> None:
        """Delete the rows of these ids, and erase them later if that is in a transaction of this table."""
        for batch in self.in_batches(ids):
            connection.execute(self._table.delete().where(batch))
        self._deletions += len(ids)

    def delete_where(self, connection: sa.Connection, *conditions: sa.ColumnElement[bool]) -> int:
        """`delete` of all rows for which the conditions hold; returns how many."""
        count = connection.execute(self._table.delete().where(*conditions)).rowcount
        self._deletions += count
        return count

    def erase(self) -> None:
        """Leave nothing in the database's files of what was deleted since, as far as readers let it."""
        if self._erasure:
            with self._named():
                self._erasure.finish()

    @contextmanager
    def _taking(self) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            if not self.database.is_refusal(error):
                raise
            raise CacheError(f"{self._what} in {self.database.name} cannot hold this: {reason(error)}") from error

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            message = f"{self._what} in {self.database.name} cannot be used now: {reason(error)}"
            raise CacheUnavailableError(message) from error
