"""SQLite: one database file in a folder, with a write-ahead log next to it."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.pool import ConnectionPoolEntry

from agentspec.cache.storage.database import Database, reason
from agentspec.cache.storage.path_lock import PathLock
from agentspec.errors import (
    CacheLockedError,
    CacheUnavailableError,
    ConfigurationError,
)

_log = logging.getLogger(__name__)

DATABASE, STATE = "sequences.sqlite3", "state.sqlite3"
_MAKING = threading.Lock()  # so that no thread of this process has SQLite open a file that another one is just closing
_TIMEOUT = 30  # seconds to wait for another process's lock
_PATIENCE = 3000  # milliseconds to wait for readers; writers wait for us meanwhile
_INCREMENTAL = 2  # SQLite's number for it
_PRIMARY = 0xFF  # the bits of SQLite's error codes that hold the primary code
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_NOTADB)
_PASSING = {getattr(sqlite3, f"SQLITE_{name}") for name in "BUSY LOCKED FULL NOMEM INTERRUPT CANTOPEN PROTOCOL".split()}
# I/O errors after which all committed data are still there. A failed fsync is none of them: the kernel drops the pages
# that it could not write, and the next fsync succeeds without them.
_PASSING_IO = {
    getattr(sqlite3, f"SQLITE_IOERR_{name}")
    for name in "WRITE TRUNCATE SHMOPEN SHMSIZE SHMLOCK SHMMAP LOCK RDLOCK NOMEM".split()
}


class SqliteDatabase(Database):
    """The database in a folder, which is created if missing. Raises `OSError` if it cannot be created.

    Raises `CacheUnavailableError` in a process that was forked from one that had such a database open: SQLite's locks
    were copied as they were at that moment, and may never be released.
    """

    _forked = False  # whether this process was

    def __init__(self, folder: Path, file: str = DATABASE) -> None:
        if SqliteDatabase._forked:
            raise CacheUnavailableError(
                "this process was forked from one that had a cache in a folder open, and SQLite cannot be used in both:"
                " open the cache after the fork, or start the process with spawn"
            )
        self.path = folder.expanduser().absolute() / file
        self.folder: Path | None = self.path.parent
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.name = str(self.path)
        self._lock: PathLock | None = None
        self._is_candidate = False
        self._electing = threading.Lock()
        self._file: tuple[int, int] | None = None  # device and inode of the database's file
        place = sa.URL.create("sqlite", database=str(self.path))  # a `?` in the path begins no options
        self.engine = sa.create_engine(place, connect_args={"timeout": _TIMEOUT}, hide_parameters=True)
        event.listen(self.engine, "connect", _configure)
        event.listen(self.engine, "do_connect", self._require_same_file)
        event.listen(self.engine, "handle_error", self._note_error)
        self._refuse_when_closed()

    def acquire_writer(self) -> None:
        with self._electing:
            self._is_candidate = True
            self._lock = self._locked()

    def _locked(self) -> PathLock:
        """The lock of the folder's writer. Raises `CacheLockedError` if another process holds it, and `OSError`."""
        lock = PathLock(self.path.with_name("writer.lock"))
        if not lock.acquire():
            raise CacheLockedError(f"{self.folder} is written by process {lock.holder()}; open it as a follower")
        return lock

    @property
    def is_writer(self) -> bool:
        return self._lock is not None

    def renew_lease(self) -> None:
        with self._electing:
            moved = self._is_moved()
            if self._lock is not None and (moved or not self._lock.is_held):
                what = "it" if moved else "its lock file"
                _log.warning("no longer the writer of %s: %s was deleted or replaced", self.name, what)
                self._lock.release()
                self._lock = None
            self._require_same_file()  # who opens what is there now can be its writer
            if self._lock is None and self._is_candidate:
                with contextlib.suppress(CacheLockedError):
                    self._lock = self._locked()

    def confirm_writer(self, connection: sa.Connection) -> bool:
        lock = self._lock
        return lock is not None and lock.is_held

    def connect(self) -> None:
        for suffix in ("-wal", "-shm"):
            if (other := self.path.with_name(self.path.name + suffix)).is_symlink():
                raise ConfigurationError(
                    f"{other} is a symbolic link, which is not followed: put the file itself there"
                )
        self._file = _made_private(self.path)

    def _is_moved(self) -> bool:
        return self._file is not None and self._file != _identity(self.path)

    def _require_same_file(self, *_: object) -> None:
        if self._is_moved():
            raise CacheUnavailableError(
                f"{self.name} was deleted or replaced while it was open, and is neither read nor written any more:"
                " open the cache again, or restart the server"
            )

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        with self.engine.begin() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            self._require_same_file()
            yield connection

    def disk_bytes(self) -> int:
        names = (DATABASE, STATE) if self.path.name == DATABASE else (self.path.name,)
        files = [self.path.with_name(name + suffix) for name in names for suffix in ("", "-wal")]  # -shm is memory
        return sum(file.stat().st_size for file in files if file.exists())

    def shrink(self) -> bool:
        return self._empty_journal("PRAGMA incremental_vacuum;")

    def secure_erase(self, *, rewrite: bool) -> bool:
        # SQLite overwrites rows as it deletes them; remains may lie in moved pages and in the journal.
        return self._empty_journal("VACUUM;" if rewrite else "PRAGMA incremental_vacuum;")

    def _empty_journal(self, script: str) -> bool:
        with self.engine.connect() as connection:
            cursor = connection.connection.cursor()
            try:
                cursor.execute(f"PRAGMA busy_timeout = {_PATIENCE}").fetchall()
                cursor.executescript(script)  # runs each step of a statement: incremental_vacuum frees a page a step
                [(busy, _, _)] = cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                return not busy
            except sqlite3.DatabaseError as error:
                if not self.is_transient(error):
                    raise exc.OperationalError(script, None, error) from error
                return False
            finally:
                connection.invalidate()  # do not return it to the pool with its short busy_timeout

    def problems(self) -> list[str]:
        try:
            with self.engine.connect() as connection:
                lines = connection.exec_driver_sql("PRAGMA integrity_check").scalars().all()
        except exc.DBAPIError as error:
            if not self.is_damage(error):
                raise
            return [reason(error)]
        found = [str(line) for line in lines if line != "ok"]
        if found:
            self.mark_damage()
        return found

    @property
    def damage_mark(self) -> Path:
        """A file that is there once damage was met: the next writer that opens the database puts it aside."""
        return self.path.with_name(f"{self.path.name}.damage")

    def mark_damage(self) -> None:
        if self.path.name == DATABASE:  # all else cannot be made again
            with contextlib.suppress(OSError):
                self.damage_mark.touch(0o600)

    def _note_error(self, context: sa.ExceptionContext) -> None:
        if self.is_damage(context.original_exception):
            self.mark_damage()

    def is_transient(self, error: BaseException) -> bool:
        code = getattr(getattr(error, "orig", error), "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        return isinstance(error, exc.TimeoutError) or code & _PRIMARY in _PASSING or code in _PASSING_IO

    def is_damage(self, error: BaseException) -> bool:
        code = getattr(getattr(error, "orig", error), "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        return code & _PRIMARY in _DAMAGE

    def is_refusal(self, error: BaseException) -> bool:
        code = getattr(getattr(error, "orig", error), "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        return code != sqlite3.SQLITE_CONSTRAINT_TRIGGER and super().is_refusal(error)  # such a trigger is none of ours

    def leave_behind(self, reason: str) -> None:
        SqliteDatabase._forked = True
        if self._lock:
            self._lock.leave()
        super().leave_behind(reason)

    def close(self) -> None:
        super().close()
        with self._electing:
            self._is_candidate = False
            if self._lock:
                self._lock.release()
                self._lock = None


class MemoryDatabase(SqliteDatabase):
    """A database in this process's memory, gone with it. One thread at a time uses it."""

    def __init__(self) -> None:
        self.name, self.folder = "the memory of this process", None
        self.path = Path(":memory:")
        self._file, self._lock, self._is_candidate, self._electing = None, None, False, threading.Lock()
        shared = {"check_same_thread": False}
        self.engine = sa.create_engine(
            "sqlite://", poolclass=sa.QueuePool, pool_size=1, max_overflow=0, connect_args=shared, hide_parameters=True
        )
        event.listen(self.engine, "connect", _configure)
        self._refuse_when_closed()

    def connect(self) -> None:
        """There is nothing to find."""

    def disk_bytes(self) -> int:
        return 0

    def shrink(self) -> bool:
        return True

    def secure_erase(self, *, rewrite: bool) -> bool:
        return True  # a connection's pages are overwritten as rows are deleted

    def leave_behind(self, reason: str) -> None:
        Database.leave_behind(self, reason)


def _made_private(path: Path) -> tuple[int, int]:
    """Create the database's file if it is missing, close it to others, and return its device and inode.

    A file that is there is not opened: to close it would release the locks that SQLite holds on it in this process.
    """
    with _MAKING, contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise ConfigurationError(
            f"{path} is a symbolic link, which is not followed: put the file itself there", param="path"
        )
    if not stat.S_ISREG(status.st_mode):
        raise ConfigurationError(f"{path} is no file", param="path")
    if status.st_mode & 0o077 and status.st_uid == os.geteuid():
        path.chmod(0o600)
    return status.st_dev, status.st_ino


def _identity(path: Path) -> tuple[int, int] | None:
    """The device and inode of the file that is there now."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _text(data: bytes) -> str:
    """Damaged text can be read too: one bad name must not hide all other rows."""
    return data.decode(errors="surrogateescape")


def _configure(connection: Any, _: ConnectionPoolEntry) -> None:
    connection.text_factory = _text
    cursor = connection.cursor()
    if cursor.execute("PRAGMA auto_vacuum").fetchone() != (_INCREMENTAL,):  # to set it waits for whoever writes
        cursor.execute("PRAGMA auto_vacuum = INCREMENTAL")
    _use_write_ahead_log(cursor)
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA secure_delete = ON")  # overwrite deleted and moved data
    cursor.execute("PRAGMA temp_store = MEMORY")  # else what a savepoint may undo is written to the system's folder
    cursor.close()


def _use_write_ahead_log(cursor: sqlite3.Cursor) -> None:
    """Set the journal mode. SQLite does not wait for other processes here, whatever the connection's timeout."""
    deadline = time.monotonic() + _TIMEOUT
    while True:
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & _PRIMARY != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
