"""The database interface of the store; `cache/storage/sqlite.py` and `cache/storage/postgres.py` implement it."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.dialects import postgresql, sqlite

from agentspec.errors import CacheClosedError, CacheError

Upsert = sqlite.Insert | postgresql.Insert

FAILURES = (exc.DBAPIError, exc.TimeoutError)
"""What a database raises that does not answer; the second where all connections of this process stay in use."""

_LEFT: list[sa.Pool] = []
_AGAIN = 60.0  # seconds until what could not be rewritten is tried again
_REWRITTEN = 512 << 20  # bytes; rewriting more would keep other processes from writing for too long

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
    has_refused = False  # whether a row that it never takes was logged
    _closed_because: str | None = None

    def _refuse_when_closed(self) -> None:
        """Let no connection of the engine be made after `close` or in a forked process: it would make itself again."""
        event.listen(self.engine, "do_connect", self._require_open)

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

    def insert(self, table: sa.Table) -> Upsert:
        """An insert statement that supports ON CONFLICT."""
        return sqlite.insert(table) if self.engine.dialect.name == "sqlite" else postgresql.insert(table)

    @abstractmethod
    def disk_bytes(self) -> int:
        """Bytes that our tables or files take."""

    @abstractmethod
    def shrink(self) -> bool:
        """Return the space of deleted rows to the file system; false while another process prevents it."""

    @abstractmethod
    def secure_erase(self, *, rewrite: bool) -> bool:
        """Erase every byte of deleted rows, with `rewrite` by writing the tables again; false as in `shrink`."""

    def mark_damage(self) -> None:
        """Let the next writer that opens the database start a new one, where it is a file."""
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

    def leave_behind(self, reason: str) -> None:
        """Called in a forked process: neither use nor close the parent's connections, and make none."""
        self._closed_because = reason
        _LEFT.append(self.engine.pool)  # closing a copy of a connection would end the parent's
        self.engine.dispose(close=False)

    @abstractmethod
    def close(self) -> None:
        """Close the connections and stop being the writer; what comes later raises `CacheClosedError`. Idempotent."""
        self._closed_because = self._closed_because or "this cache is closed"
        self.engine.dispose()


class PendingErasure:
    """Whether bytes of deleted rows may be left in the files of a database. Thread-safe.

    What is deleted while an erasure runs may escape it, and stays pending.
    """

    def __init__(self, database: Database, *, pending: bool = False) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._marked = int(pending)  # how often rows were deleted,
        self._erased = 0  # and how often when the last erasure began that succeeded
        self._rewrite = False  # whether what held them is to be written again
        self._again = 0.0  # when that is repeated where others prevented it

    @property
    def is_pending(self) -> bool:
        return self._marked > self._erased

    def mark(self, *, rewrite: bool = False) -> None:
        """Rows were deleted, and that is committed: an erasure before the commit erases nothing of them."""
        self._rewrite = self._rewrite or rewrite
        self._marked += 1

    def finish(self, *, now: bool = False) -> None:
        """Erase them as `Database.secure_erase` does; they stay pending where it is prevented or raises.

        A rewrite that others prevented is repeated `now`, or after a minute; a large database is not rewritten.
        Raises `CacheError`.
        """
        with self._lock:
            if not self.is_pending or (not now and time.monotonic() < self._again):
                return
            marked, rewrite, self._rewrite = self._marked, self._rewrite, False
            try:
                small = rewrite and self._database.disk_bytes() <= _REWRITTEN
                if self._database.secure_erase(rewrite=small):
                    self._erased, self._again = marked, 0.0
            except FAILURES as error:
                name = self._database.name
                raise CacheError(f"deleted, but bytes may be left in {name}: {reason(error)}") from error
            finally:
                if marked > self._erased and rewrite and not self._database.overwrites:
                    self._owe_rewrite()

    def _owe_rewrite(self) -> None:
        if not self._again:
            _log.warning(
                "what was forgotten is deleted from %s, but others use what held it, so that its bytes are still there:"
                " this process tries again every minute",
                self._database.name,
            )
        self._rewrite, self._again = True, time.monotonic() + _AGAIN


def write_rows(
    database: Database, connection: sa.Connection, statement: sa.Executable, rows: Sequence[Mapping[str, Any]]
) -> int:
    """Execute a statement for each row, in the caller's transaction; returns how many rows the database refuses.

    Such a row, say one with too long a name, holds up no other. The first is logged.
    """
    if not rows:
        return 0
    part = connection.begin_nested()
    try:
        connection.execute(statement, rows)
    except Exception as error:
        if not database.is_refusal(error):
            raise  # and end the caller's transaction: SQLite may have ended it, and `part` with it
        part.rollback()
        if len(rows) == 1:
            if not database.has_refused:
                database.has_refused = True
                message = "%s refuses some of what is stored, which is left out; are its names too long? %s"
                _log.warning(message, database.name, reason(error))
            return 1
    else:
        part.commit()
        return 0
    half = len(rows) // 2
    return sum(write_rows(database, connection, statement, some) for some in (rows[:half], rows[half:]))


def reason(error: BaseException) -> str:
    """The database's error message, without the statement and its values."""
    original = error.orig if isinstance(error, exc.DBAPIError) else error
    first = getattr(getattr(original, "diag", None), "message_primary", None)  # a server's details tell values
    return " ".join(str(first or original).split())
