"""Opens the database at an address or in a folder: makes its tables, or saves what can be read of a damaged one."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import sqlalchemy as sa
from sqlalchemy import exc

from agentspec.cache.storage.database import Database, reason
from agentspec.cache.storage.postgres import PostgresDatabase
from agentspec.cache.storage.schema import VERSION, damaged, meta, metadata
from agentspec.cache.storage.sqlite import SqliteDatabase
from agentspec.errors import (
    CacheFormatError,
    CacheUnavailableError,
    CacheVersionError,
    ConfigurationError,
)

_log = logging.getLogger(__name__)

_WRONG_PATH = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL}


@contextmanager
def opening(target: str | Path) -> Iterator[Database]:
    """The database at an address, or in a folder, which is created if missing; closed again where the block fails.

    Raises as `SequenceStore.open`, also for what the block raises.
    """
    if not isinstance(target, str | Path) or not str(target).strip() or "\0" in str(target):
        message = (
            f"path must be a folder, or the address of a database such as postgresql://user@host/name, not {target!r}"
        )
        raise ConfigurationError(message, param="path")
    try:
        database: Database = PostgresDatabase(target) if _is_address(target) else SqliteDatabase(Path(target))
    except (OSError, RuntimeError) as error:  # the second: the home folder of an unknown user
        raise_unusable(str(target), error, transient=False)
    try:
        yield database
    except BaseException as error:
        database.close()
        if isinstance(error, OSError | exc.DBAPIError):
            raise_unusable(database.name, error, transient=database.is_transient(error))
        raise


def _is_address(target: str | Path) -> TypeGuard[str]:
    if isinstance(target, Path) and re.match(r"[a-z+]+:/", str(target)):
        raise ConfigurationError("path must be a string where it is an address, not a Path", param="path")
    return "://" in str(target)


def raise_unusable(name: str, error: BaseException, *, transient: bool) -> NoReturn:
    """Raise the error for a database that could not be opened; its type depends on what the user can do about it."""
    message = f"the cache database {name} cannot be opened: {reason(error)}"
    elsewhere = isinstance(error, OSError) and error.errno not in _WRONG_PATH  # such as a file system without locks
    if transient or elsewhere or isinstance(error, exc.OperationalError):
        raise CacheUnavailableError(message) from error
    if isinstance(error, exc.DBAPIError) and not isinstance(error, exc.ProgrammingError):
        raise damaged(name, reason(error)) from error
    raise ConfigurationError(message, param="path") from error


def prepare(database: Database) -> None:
    """Create the tables where there are none, in one transaction, even while other processes do.

    Raises `CacheVersionError` if they are of another version, and `CacheFormatError` if they are damaged, or another
    program's.
    """
    with database.engine.connect() as connection:
        if is_prepared(connection, database):  # the usual case, which takes no lock
            return
    with database.writing() as connection:
        if not is_prepared(connection, database):
            metadata.create_all(connection)
            connection.execute(meta.insert().values(key="version", value=str(VERSION)))


def is_prepared(connection: sa.Connection, database: Database) -> bool:
    """Whether the tables are there. Raises as `prepare`."""
    name, tables = database.name, set(sa.inspect(connection).get_table_names())
    if not tables:
        return False
    if meta.name not in tables:
        raise CacheFormatError(f"{name} is another program's database; choose another")
    if missing := metadata.tables.keys() - tables:
        database.mark_damage()
        raise damaged(name, f"without {', '.join(sorted(missing))}")
    version = connection.execute(sa.select(meta.c.value).where(meta.c.key == "version")).scalar()
    if version == str(VERSION):
        return True
    if version is None or not version.isdecimal():
        database.mark_damage()
        raise damaged(name, f"version {version!r}")
    raise CacheVersionError(
        f"{name} is of version {version}, and this agentspec reads version {VERSION} alone: use the agentspec that"
        " wrote it, or move the database away to start a new cache"
    )


# What can be read of a damaged database.


def replace_damaged(database: Database) -> bool:
    """Whether damage was met in the database, and it is replaced. Done by its writer, before it uses the database.

    A killed process leaves the old database in its place, or the new one. Processes that have the old one open neither
    read nor write any more, and say so.
    """
    if not (isinstance(database, SqliteDatabase) and database.is_writer and database.damage_mark.exists()):
        return False
    database.engine.dispose()
    path = database.path
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
    for ending in ("", "-wal", "-shm"):
        path.with_name(f"{path.name}.new{ending}").unlink(missing_ok=True)
    fresh = SqliteDatabase(path.parent, file=f"{path.name}.new")
    fresh.connect()
    prepare(fresh)
    with fresh.writing() as connection, contextlib.closing(sqlite3.connect(path)) as old:
        copied = _copy_readable(old, connection)
    fresh.close()
    for ending in ("-wal", "-shm"):  # first: they must not be taken for the new one's
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}{ending}", f"{aside}{ending}")
    os.link(path, aside)
    os.replace(fresh.path, path)
    _log.warning(
        "%s was damaged. The %d rows that could be read are in a new database, and the rest starts cold; the damaged"
        " one is now %s, which also keeps what is forgotten from now on: delete it once you do not need it",
        *(path, copied, aside),
    )
    database.connect()
    database.damage_mark.unlink(missing_ok=True)
    return True


def _copy_readable(old: sqlite3.Connection, new: sa.Connection) -> int:
    """Copy the rows of our tables, from both ends up to what is damaged; returns how many."""
    old.text_factory = lambda data: data.decode(errors="surrogateescape")
    old.execute("PRAGMA writable_schema = ON")  # so that a file that lost its end can be opened, too
    return sum(_copy(old, new, table) for table in metadata.sorted_tables if table is not meta)


def _copy(old: sqlite3.Connection, new: sa.Connection, table: sa.Table) -> int:
    names = ", ".join(f'"{column.name}"' for column in table.columns)
    insert = f"INSERT OR IGNORE INTO {table.name} ({names}) VALUES ({', '.join('?' * len(table.columns))})"
    select = f"SELECT rowid, {names} FROM {table.name} NOT INDEXED"
    copied = 0
    for order, beyond, last in (("", ">", -(1 << 63)), (" DESC", "<", (1 << 63) - 1)):
        try:
            for id_, *row in old.execute(f"{select} ORDER BY rowid{order}"):
                copied += _inserted(new, insert, row)
                last = id_
            return copied
        except sqlite3.DatabaseError as error:
            _log.info("of %s not all can be read: %s", table.name, error)
        with contextlib.suppress(sqlite3.DatabaseError):  # a cursor that fails drops the row that it read before
            for _, *row in old.execute(f"{select} WHERE rowid {beyond} ? ORDER BY rowid{order} LIMIT 1", (last,)):
                copied += _inserted(new, insert, row)
    return copied


def _inserted(new: sa.Connection, insert: str, row: list[Any]) -> int:
    with contextlib.suppress(ValueError):  # damaged text
        return max(0, new.exec_driver_sql(insert, tuple(row)).rowcount)
    return 0
