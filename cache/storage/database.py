"""The database interface of the store; `cache/storage/sqlite.py` and `cache/storage/postgres.py` implement it."""

from __future__ import annotations

import logging
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.dialects import postgresql, sqlite

from agentspec.errors import CacheClosedError

Upsert = sqlite.Insert | postgresql.Insert

FAILURES = (exc.DBAPIError, exc.TimeoutError)
"""What a database raises that does not answer; the second where all connections of this process stay in use."""

_open: weakref.WeakSet[Database] = weakref.WeakSet()
_LEFT: list[sa.Pool] = []
_AGAIN = 60.0  # seconds until what could not be rewritten is tried again

_log = logging.getLogger(__name__)


class Database(ABC):
    """One database, and whether this process is its writer. Thread-safe.

    `name` is for messages and holds no password. `folder` is the folder of its files, None on a database server.
    """

    name: str
    folder: Path | None
    engine: sa.Engine
    overwrites = True
    """Whether rows are overwritten as they are deleted; else they are gone only once what held them is rewritten."""
    _closed_because: str | None = None

    def _refuse_when_closed(self) -> None:
        """Let no connection of the engine be made after `close` or in a forked process: it would make itself again."""
        event.listen(self.engine, "do_connect", self._require_open)
        _open.add(self)

    @property
    def closed(self) -> bool:
        return self._closed_because is not None

    def _require_open(self, *_: object) -> None:
        if self._closed_because is not None:
            raise CacheClosedError(self._closed_because)

    @abstractmethod
    def acquire_writer(self) -> None:
        """Become the writer until `close`. Raises `CacheLockedError`, naming the present writer.

        From now on this process is a candidate: `renew_lease` makes it the writer when there is none.
        """

    @abstractmethod
    def connect(self) -> None:
        """Check that the database can be connected to. Raises `OSError`, `DBAPIError` and `CacheFormatError`."""

    @property
    @abstractmethod
    def is_writer(self) -> bool:
        """Whether this process is the writer."""

    @abstractmethod
    def renew_lease(self) -> None:
        """Called periodically: stay the writer, or become it where there is none and this process is a candidate."""

    @abstractmethod
    def confirm_writer(self, connection: sa.Connection) -> bool:
        """Whether this process is the writer still, asked inside a write transaction.

        A process that was cut off may learn late that another took its place; that one's transactions come later.
        """

    @abstractmethod
    def writing(self) -> AbstractContextManager[sa.Connection]:
        """A write transaction. Among all processes one runs at a time, and it sees all earlier ones.

        New rows therefore become visible in the order of their ids: a reader that sees an id can see all smaller ids.
        """

    @abstractmethod
    def insert(self, table: sa.Table) -> Upsert:
        """An insert statement that supports ON CONFLICT."""

    @abstractmethod
    def disk_bytes(self) -> int:
        """Bytes that our tables or files take."""

    @abstractmethod
    def shrink(self) -> bool:
        """Return the space of deleted rows to the file system; false while another process prevents it."""

    @abstractmethod
    def secure_erase(self, *, rewrite: bool) -> bool:
        """Erase every byte of deleted rows, with `rewrite` by writing the tables anew; false as in `shrink`."""

    def mark_damage(self) -> None:
        """Let the next writer that opens the database save what can be read of it, where that can be done."""
        _log.warning("%s is damaged", self.name)

    @abstractmethod
    def problems(self) -> list[str]:
        """Faults in the database's structure, as its own integrity check reports them. Raises `DBAPIError`."""

    @abstractmethod
    def is_transient(self, error: BaseException) -> bool:
        """Whether the failed operation may succeed on a later try, with no committed data lost in between."""

    @abstractmethod
    def is_damage(self, error: BaseException) -> bool:
        """Whether a read failed because what is stored there is damaged; other rows may be sound then."""

    def is_refusal(self, error: BaseException) -> bool:
        """Whether a write failed because of a value that the database never takes; it takes others."""
        refused = isinstance(error, exc.DataError | exc.IntegrityError)
        return refused or isinstance(getattr(error, "orig", error), ValueError | TypeError | OverflowError)

    def leave_behind(self) -> None:
        """Called in a forked process: neither use nor close the parent's connections, and make none."""
        opener = f"this cache was opened by process {os.getppid()}"
        self._closed_because = f"{opener}; a forked process cannot use it: open it again in this one"
        _LEFT.append(self.engine.pool)  # closing a copy of a connection would end the parent's
        self.engine.dispose(close=False)

    @abstractmethod
    def close(self) -> None:
        """Close the connections and stop being the writer; what comes later raises `CacheClosedError`. Idempotent."""
        self._closed_because = self._closed_because or "this cache is closed"
        self.engine.dispose()


def _leave_all() -> None:
    global _open
    databases, _open = list(_open), weakref.WeakSet()
    for database in databases:
        database.leave_behind()


os.register_at_fork(after_in_child=_leave_all)


class PendingErasure:
    """Whether bytes of deleted rows may be left in the files of a database. Thread-safe.

    What is deleted while an erasure runs may escape it, and stays pending. What was to be rewritten, and could not be
    because others use it, is tried again after a minute.
    """

    def __init__(self, database: Database, *, pending: bool = False) -> None:
        self._database = database
        self._pending = pending
        self.unwritten = False  # whether rows were deleted since what held them was written anew
        self._owed = 0  # `rewrite_within` of a try that failed,
        self._again = 0.0  # and when it is repeated

    def __bool__(self) -> bool:
        return self._pending or self._overdue

    @property
    def _overdue(self) -> bool:
        return self._owed > 0 and time.monotonic() >= self._again

    @property
    def is_pending(self) -> bool:
        """Whether bytes may be left, also where that is tried again later only."""
        return self._pending or self._owed > 0

    def mark(self, *, rewrite: bool = False) -> None:
        """Rows were deleted, and that is committed: an erasure before the commit erases nothing of them.

        With `rewrite`, what held them is to be written anew.
        """
        self.unwritten = self.unwritten or rewrite
        self._pending = True

    def finish(self, *, rewrite_within: int = 0) -> None:
        """Erase them as `Database.secure_erase` does; they stay pending where it is prevented or raises.

        The database is written anew if it takes no more bytes than `rewrite_within`.
        """
        if not (self or (rewrite_within and self.unwritten)):
            return
        if self._overdue:
            rewrite_within = max(rewrite_within, self._owed)
        self._pending, unwritten = False, self.unwritten  # first: a mark that is set meanwhile stays
        self.unwritten = unwritten and not rewrite_within
        erased = False
        try:
            rewrite = 0 < rewrite_within >= self._database.disk_bytes()
            erased = self._database.secure_erase(rewrite=rewrite)
            if erased and rewrite_within:
                self._owed = 0
        finally:
            if not erased:
                self._pending, self.unwritten = True, self.unwritten or unwritten
                self._owe(rewrite_within if unwritten else 0)

    def _owe(self, rewrite_within: int) -> None:
        if self._database.overwrites or not rewrite_within:
            return
        if not self._owed:
            _log.warning(
                "what was forgotten is deleted from %s, but others use what held it, so that its bytes are still there:"
                " this process tries again every minute",
                self._database.name,
            )
        self._owed, self._again = rewrite_within, time.monotonic() + _AGAIN


class RowWriter:
    """Executes statements for rows of a database. A row that it never takes is left out, and holds up no other; the
    first is logged. `what` the rows are is for that message.
    """

    def __init__(self, database: Database, what: str) -> None:
        self._database = database
        self._what = what
        self._logged = False

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
                self._log_refusal(error)
                return 1
        else:
            part.commit()
            return 0
        half = len(rows) // 2
        return self.execute(connection, statement, rows[:half]) + self.execute(connection, statement, rows[half:])

    def _log_refusal(self, error: Exception) -> None:
        if not self._logged:
            self._logged = True
            message = "%s refuses some of %s, which is left out; are its names too long? %s"
            _log.warning(message, self._database.name, self._what, reason(error))


def reason(error: BaseException) -> str:
    """The database's error message, without the statement and its values."""
    original = error.orig if isinstance(error, exc.DBAPIError) else error
    first = getattr(getattr(original, "diag", None), "message_primary", None)  # a server's details tell values
    return " ".join(str(first or original).split())
