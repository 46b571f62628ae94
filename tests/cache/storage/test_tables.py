from __future__ import annotations

import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from agentspec.cache.storage.database import Database
from agentspec.cache.storage.opening import prepare
from agentspec.cache.storage.postgres import PostgresDatabase
from agentspec.cache.storage.schema import VERSION, metadata, processes
from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.cache.storage.sqlite import SqliteDatabase
from agentspec.errors import CacheFormatError


def connected(location: str | Path) -> Database:
    database: Database = PostgresDatabase(location) if isinstance(location, str) else SqliteDatabase(location)
    database.connect()
    return database


def test_no_two_processes_get_the_same_numbers(location: str | Path) -> None:
    stores: list[SequenceStore] = []

    def work() -> None:
        store = SequenceStore.open(location, disk_bytes=None, mode="follower")
        next(store.numbering)
        stores.append(store)

    work()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    given = [store.numbering.process for store in stores]
    assert sorted(given, key=lambda one: -(one or 0)) == [-number for number in range(1, 10)]
    for store in stores:
        numbers = [next(store.numbering) for _ in range(100)]
        assert {number >> 32 for number in numbers} == {store.numbering.process}
        assert len(set(numbers)) == 100
    with stores[0]._database.engine.connect() as connection:
        assert connection.execute(sa.select(processes.c.id)).scalars().all() == [9]  # the table does not grow
    for store in stores:
        store.close()


def test_many_open_it_at_once(location: str | Path) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            database = connected(location)
            prepare(database)
            database.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    database = connected(location)
    with database.engine.connect() as connection:
        assert {*sa.inspect(connection).get_table_names()} == {*metadata.tables}
    database.close()


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (f"UPDATE agentspec_meta SET value = '{VERSION + 1}'", f"of version {VERSION + 1}.*use the agentspec"),
        ("UPDATE agentspec_meta SET value = '4'", "of version 4.*move the database away"),
        ("DELETE FROM agentspec_meta", "damaged"),
        ("UPDATE agentspec_meta SET value = 'x'", "damaged"),
        ("DROP TABLE agentspec_meta", "another program"),
    ],
)
def test_what_cannot_be_used_is_refused(location: str | Path, statement: str, said: str) -> None:
    database = connected(location)
    prepare(database)
    with database.writing() as connection:
        connection.exec_driver_sql(statement)
    for _ in range(2):
        with pytest.raises(CacheFormatError, match=said):
            prepare(database)
    database.close()


def test_another_programs_database_is_refused_and_left_alone(location: str | Path) -> None:
    database = connected(location)
    with database.writing() as connection:
        connection.exec_driver_sql("CREATE TABLE songs (title VARCHAR)")
    with pytest.raises(CacheFormatError, match="another program"):
        prepare(database)
    with database.engine.connect() as connection:
        assert sa.inspect(connection).get_table_names() == ["songs"]
    database.close()
