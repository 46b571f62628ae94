"""Opens the database at an address or in a folder: makes its tables, and puts a damaged one aside."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeGuard

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


def replace_damaged(database: Database) -> bool:
    """Whether damage was met in the database, and an empty one takes its place. Done by its writer, before it uses it.

    A killed process leaves the old database in its place, or the new one. Processes that have the old one open neither
    read nor write any more, and say so.
    """
    if not (isinstance(database, SqliteDatabase) and database.is_writer and database.damage_mark.exists()):
        return False
    database.engine.dispose()
    path = database.path
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
    for ending in ("-wal", "-shm", ""):  # the file itself last: the others must not be taken for the new one's
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}{ending}", f"{aside}{ending}")
    _log.warning(
        "%s was damaged and is now %s; the cache starts cold. What is forgotten from now on stays in that file: delete"
        " it once you do not need it",
        *(path, aside),
    )
    database.connect()
    database.damage_mark.unlink(missing_ok=True)
    return True
