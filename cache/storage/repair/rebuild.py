"""Replaces a damaged SQLite database by a sound copy of what can be read, in one transaction."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from agentspec.cache.storage.repair.salvage import require_damage, salvage

_PAGES = 4  # copied at a time; fewer than a new database with something in it has


def faults(path: Path) -> list[str]:
    """What SQLite's own check says of the database's structure."""
    with closing(_opened(path)) as connection:
        return _faults(connection)


def losses(path: Path) -> list[str]:
    """What `rebuild` could not save, a line each; changes nothing. Raises as `rebuild`."""
    with closing(_opened(path, lenient=True)) as source, closing(_fresh(source)) as fresh:
        return _fill(source, fresh)


def rebuild(path: Path, timeout: float) -> list[str] | None:
    """Put a sound copy of all that can be read in the database's place; returns what could not be, a line each.

    None: it is sound, and was left alone. Other processes may use the database: as with `VACUUM` the change is one
    transaction in the write-ahead log, so that a killed process leaves the old database or the new one. It is built in
    a temporary file without a name. Raises `sqlite3.DatabaseError` where not even the list of tables can be read, and
    `sqlite3.OperationalError` where the database cannot be written within `timeout` seconds, or there is no room.
    """
    with (
        closing(_opened(path, timeout)) as checked,
        closing(_opened(path, timeout, lenient=True)) as source,
        closing(_opened(path, timeout, lenient=True)) as target,
        closing(_fresh(source)) as fresh,
    ):
        lost: list[str] | None = None

        def step(status: int, *_: int) -> None:
            nonlocal lost
            if status in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise _busy()
            if lost is None:
                if not _faults(checked):
                    raise _IsSoundError
                lost = _fill(source, fresh)

        try:
            # The first step locks the database for writing until all is copied. What others wrote before is in
            # `source`, and nothing comes later; so it is read only now.
            fresh.backup(target, pages=_PAGES, progress=step)
        except _IsSoundError:
            return None
    return lost


class _IsSoundError(Exception):
    """There is nothing to mend: perhaps another process just did."""


def _opened(path: Path, timeout: float = 5.0, *, lenient: bool = False) -> sqlite3.Connection:
    """A connection; a `lenient` one also opens a file that lost its end."""
    connection = sqlite3.connect(path, timeout=timeout, isolation_level=None)
    connection.text_factory = lambda data: data.decode(errors="surrogateescape")
    if lenient:
        connection.execute("PRAGMA writable_schema = ON")
    return connection


def _fresh(source: sqlite3.Connection) -> sqlite3.Connection:
    """An empty database in a temporary file, with as large pages, that something is in."""
    [page_size] = source.execute("PRAGMA page_size").fetchone()
    connection = sqlite3.connect("", isolation_level=None)
    connection.execute(f"PRAGMA page_size = {page_size}")
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("CREATE TABLE filler (zeros BLOB)")
    connection.execute("INSERT INTO filler VALUES (zeroblob(?))", (2 * _PAGES * page_size,))
    return connection


def _fill(source: sqlite3.Connection, fresh: sqlite3.Connection) -> list[str]:
    fresh.execute("DROP TABLE filler")
    source.execute("BEGIN")  # all is read as of one moment; it ends with the connection
    fresh.execute("BEGIN")
    lost = salvage(source, fresh)
    fresh.execute("COMMIT")
    fresh.execute("PRAGMA incremental_vacuum").fetchall()
    if wrong := _faults(fresh):
        raise sqlite3.DatabaseError(f"what was saved is not sound: {wrong[0]}")
    return lost


def _faults(connection: sqlite3.Connection) -> list[str]:
    try:
        lines = [str(line) for [line] in connection.execute("PRAGMA integrity_check")]
    except sqlite3.DatabaseError as error:
        require_damage(error)
        return [str(error)]
    return [line for line in lines if line != "ok"]


def _busy() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY
    return error
