"""Puts a new SQLite database, with all rows that can be read, in the place of a damaged one, which is renamed."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from agentspec.cache.storage.database import Database
from agentspec.cache.storage.schema import meta, metadata, namespaces
from agentspec.cache.storage.sqlite import SqliteDatabase
from agentspec.cache.storage.tables import prepare

_log = logging.getLogger(__name__)


def replace_damaged(database: Database) -> bool:
    """Whether damage was met in the database, and it is replaced. Done by its writer, before it uses the database.

    A killed process leaves the old database in its place, or the new one. Processes that have the old one open neither
    read nor write any more, and say so.
    """
    if not (isinstance(database, SqliteDatabase) and database.is_writer and database.damage_mark.exists()):
        return False
    database.engine.dispose()
    _replace(database.path)
    database.connect()
    database.damage_mark.unlink(missing_ok=True)
    return True


def _replace(path: Path) -> None:
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
    for ending in ("", "-wal", "-shm"):
        path.with_name(f"{path.name}.new{ending}").unlink(missing_ok=True)
    fresh = SqliteDatabase(path.parent, file=f"{path.name}.new")
    fresh.connect()
    prepare(fresh)
    with fresh.writing() as connection, contextlib.closing(sqlite3.connect(path)) as old:
        copied = copy_readable(old, connection)
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


def copy_readable(old: sqlite3.Connection, new: sa.Connection) -> int:
    """Copy the rows of our tables, from both ends up to what is damaged; returns how many."""
    old.text_factory = lambda data: data.decode(errors="surrogateescape")
    old.execute("PRAGMA writable_schema = ON")  # so that a file that lost its end can be opened, too
    return sum(_copy(old, new, table) for table in metadata.sorted_tables if table not in (meta, namespaces))


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
