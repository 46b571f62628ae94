"""Tables of the sequence database, and opening it: created, checked, or refused with the reason."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.pool import ConnectionPoolEntry

from agentspec.errors import CacheFormatError

VERSION = 1

metadata = sa.MetaData()

meta = sa.Table(
    "agentspec_meta",
    metadata,
    sa.Column("key", sa.String, primary_key=True),
    sa.Column("value", sa.String, nullable=False),
)

sequences = sa.Table(
    "sequences",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("number", sa.BigInteger, nullable=False, unique=True),  # (process << 32) + count: unique among processes
    sa.Column("namespace", sa.String(64), nullable=False, index=True),  # Namespace.key of the next four
    sa.Column("tenant", sa.String, nullable=False),
    sa.Column("model_fingerprint", sa.String, nullable=False),
    sa.Column("tokenizer_hash", sa.String, nullable=False),
    sa.Column("template_hash", sa.String, nullable=False),
    sa.Column("session", sa.String),
    sa.Column("workflow", sa.String),
    sa.Column("step", sa.String),
    sa.Column("token_count", sa.Integer, nullable=False),
    sa.Column("tokens", sa.LargeBinary, nullable=False),  # zlib of context and tokens, little-endian int32
    sa.Column("created_at", sa.Float, nullable=False),  # seconds since 1970
    sa.Column("hits", sa.Integer, nullable=False, default=0),
    sqlite_autoincrement=True,
)

learned = sa.Table(
    "learned",
    metadata,
    sa.Column("namespace", sa.String(64), primary_key=True),
    sa.Column("state", sa.LargeBinary, nullable=False),
)

deletions = sa.Table(
    "deletions",  # one row per forget: a Scope, for the processes that have to follow it
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("salt", sa.String, nullable=False),
    sa.Column("tenant", sa.String),  # hashes, as session
    sa.Column("session", sa.String),
    sa.Column("tokenizer", sa.String),
    sa.Column("before", sa.Float),
    sa.Column("searched", sa.Boolean, nullable=False),
    sqlite_autoincrement=True,
)


def open_database(path: Path) -> sa.Engine:
    """The database at `path`, created where there is none, readable by its owner only.

    Raises `CacheFormatError` where the file is something else, damaged, or of a newer version; `OSError` and
    `sqlalchemy.exc.OperationalError` where it cannot be created.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    with path.open("rb") as file:
        head = file.read(16)
    if head not in (b"", b"SQLite format 3\0"):
        raise CacheFormatError(f"{path} is not a database; move it away to start a new cache")
    engine = sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": 30})
    event.listen(engine, "connect", _configure)
    try:
        _create_or_check(engine, path)
    except BaseException as error:
        engine.dispose()
        if isinstance(error, exc.DatabaseError) and not isinstance(error, exc.OperationalError):
            raise damaged(path, error) from error
        raise
    return engine


def damaged(path: Path, reason: object) -> CacheFormatError:
    return CacheFormatError(f"{path} is damaged; move it away to start a new cache ({reason})")


def _configure(connection: Any, _: ConnectionPoolEntry) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA auto_vacuum = INCREMENTAL")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA secure_delete = ON")  # what is deleted or moved is overwritten
    cursor.close()


def _create_or_check(engine: sa.Engine, path: Path) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        tables = set(sa.inspect(connection).get_table_names())
        if not tables:
            metadata.create_all(connection)
            connection.execute(meta.insert().values(key="version", value=str(VERSION)))
        elif meta.name not in tables:
            raise CacheFormatError(f"{path} is another program's database; choose another folder")
        else:
            _check_version(connection, path)
            deletions.create(connection, checkfirst=True)


def _check_version(connection: sa.Connection, path: Path) -> None:
    version = connection.execute(sa.select(meta.c.value).where(meta.c.key == "version")).scalar()
    if version is None or not version.isdigit():
        raise damaged(path, f"version {version!r}")
    if int(version) > VERSION:
        raise CacheFormatError(f"{path} is of version {version}, newer than {VERSION}: update agentspec to use it")
