"""Prepares a database at opening: creates its tables, migrates them to the newest schema, or refuses it."""

from __future__ import annotations

import threading
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import exc

from agentspec.cache.storage.database import Database
from agentspec.cache.storage.migrations.partitions import DIVIDE
from agentspec.cache.storage.migrations.totals import TRIGGERS
from agentspec.cache.storage.schema import VERSION, damaged, meta, metadata, revision
from agentspec.errors import CacheFormatError

_alembic = threading.Lock()  # Alembic keeps the running migration in module globals


def prepare(database: Database) -> None:
    """Bring the database to the newest schema in one transaction, even while other processes open it.

    Raises `CacheFormatError` if it is another program's database, damaged, or of a newer version.
    """
    with database.engine.connect() as connection:
        if version_of(connection, database) == VERSION:  # the usual case, which takes no lock
            return
    with database.writing() as connection:
        match version_of(connection, database):
            case 0:
                _create(connection)
            case version if version < VERSION:
                upgrade(connection)


def version_of(connection: sa.Connection, database: Database) -> int:
    """The version of the tables, 0 if there are none yet. Raises `CacheFormatError` as `prepare`."""
    name, tables = database.name, set(sa.inspect(connection).get_table_names())
    if not tables:
        return 0
    if meta.name not in tables:
        raise CacheFormatError(f"{name} is another program's database; choose another")
    written = sa.select(meta.c.value).where(meta.c.key == "version")
    query = sa.select(revision.c.version_num) if revision.name in tables else written
    try:
        version = connection.execute(query).scalar()
    except exc.DBAPIError as error:
        if not database.is_damage(error):
            raise
        version = connection.execute(written).scalar()
    if version is None or not version.isdigit():
        raise damaged(name, f"version {version!r}")
    if int(version) > VERSION:
        raise CacheFormatError(f"{name} is of version {int(version)}, newer than {VERSION}: update agentspec to use it")
    return int(version)


def _create(connection: sa.Connection) -> None:
    """Create the newest tables directly. The tests check that the migrations lead to the same tables."""
    metadata.create_all(connection)
    further = DIVIDE if connection.dialect.name == "postgresql" else ()
    for statement in (*TRIGGERS[connection.dialect.name], *further):
        connection.exec_driver_sql(statement)
    connection.execute(revision.insert().values(version_num=f"{VERSION:04}"))
    # Releases from before the migrations read the version here, and refuse this one.
    connection.execute(meta.insert().values(key="version", value=str(VERSION)))


def upgrade(connection: sa.Connection, target: str = "head") -> None:
    """Run the missing migrations, up to `target`, inside the caller's transaction."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    with _alembic:
        command.upgrade(config, target)
