"""Prepares a database at opening: creates its tables, or refuses those of another version."""

from __future__ import annotations

import sqlalchemy as sa

from agentspec.cache.storage.database import Database
from agentspec.cache.storage.schema import VERSION, damaged, meta, metadata
from agentspec.cache.storage.totals import TRIGGERS
from agentspec.errors import CacheFormatError, CacheVersionError


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
            for statement in TRIGGERS[connection.dialect.name]:
                connection.exec_driver_sql(statement)
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
        " wrote it (its `cache export` takes the sequences along), or move the database away to start a new cache"
    )
