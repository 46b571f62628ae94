"""Opens the database at an address or in a folder, and picks the error to raise when that fails."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeGuard

from sqlalchemy import exc

from agentspec.cache.storage.database import Database, reason
from agentspec.cache.storage.postgres import PostgresDatabase
from agentspec.cache.storage.schema import damaged
from agentspec.cache.storage.sqlite import SqliteDatabase
from agentspec.errors import CacheLockedError, CacheUnavailableError, ConfigurationError

_WRONG_PATH = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL}


def open_database(target: str | Path) -> Database:
    """The database at an address, or in a folder, which is created if missing. Raises as `SequenceStore.open`."""
    if not isinstance(target, str | Path) or not str(target).strip() or "\0" in str(target):
        message = (
            f"path must be a folder, or the address of a database such as postgresql://user@host/name, not {target!r}"
        )
        raise ConfigurationError(message, param="path")
    try:
        return PostgresDatabase(target) if _is_address(target) else SqliteDatabase(Path(target))
    except (OSError, RuntimeError) as error:  # the second: the home folder of an unknown user
        raise_unusable(str(target), error, transient=False)


@contextmanager
def opening(target: str | Path) -> Iterator[Database]:
    """The database, closed again where the block fails; the block raises as `SequenceStore.open` does."""
    database = open_database(target)
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


def acquire_writer(database: Database, mode: str) -> None:
    """Become the writer, or with mode "auto" a candidate that succeeds the present one; a "follower" is neither.

    If another process is the writer, mode "writer" raises `CacheLockedError`.
    """
    if mode == "follower":
        return
    try:
        database.acquire_writer()
    except CacheLockedError:
        if mode == "writer":
            raise


def raise_unusable(name: str, error: BaseException, *, transient: bool) -> NoReturn:
    """Raise the error for a database that could not be opened; its type depends on what the user can do about it."""
    message = f"the cache database {name} cannot be opened: {reason(error)}"
    elsewhere = isinstance(error, OSError) and error.errno not in _WRONG_PATH  # such as a file system without locks
    if transient or elsewhere or isinstance(error, exc.OperationalError):
        raise CacheUnavailableError(message) from error
    if isinstance(error, exc.DBAPIError) and not isinstance(error, exc.ProgrammingError):
        raise damaged(name, reason(error)) from error
    raise ConfigurationError(message, param="path") from error
