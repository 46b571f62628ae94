from __future__ import annotations

import re
import sqlite3
import threading
import zlib
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from agentspec.cache import SuffixCache
from agentspec.cache.storage import migrations
from agentspec.cache.storage.database import Database
from agentspec.cache.storage.migration import prepare, upgrade
from agentspec.cache.storage.postgres import PostgresDatabase
from agentspec.cache.storage.schema import VERSION, metadata, processes, revision
from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.cache.storage.sqlite import DATABASE, SqliteDatabase
from agentspec.errors import CacheFormatError
from agentspec.types import Namespace

# What the first version wrote.
FIRST = """
CREATE TABLE agentspec_meta ("key" VARCHAR NOT NULL, value VARCHAR NOT NULL, PRIMARY KEY ("key"));
INSERT INTO agentspec_meta VALUES ('version', '1');
CREATE TABLE sequences (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    number BIGINT NOT NULL,
    namespace VARCHAR(64) NOT NULL,
    tenant VARCHAR NOT NULL,
    model_fingerprint VARCHAR NOT NULL,
    tokenizer_hash VARCHAR NOT NULL,
    template_hash VARCHAR NOT NULL,
    session VARCHAR,
    workflow VARCHAR,
    step VARCHAR,
    token_count INTEGER NOT NULL,
    tokens BLOB NOT NULL,
    created_at FLOAT NOT NULL,
    hits INTEGER NOT NULL,
    UNIQUE (number)
);
CREATE INDEX ix_sequences_namespace ON sequences (namespace);
CREATE TABLE learned (namespace VARCHAR(64) NOT NULL, state BLOB NOT NULL, PRIMARY KEY (namespace));
"""
FIRST_DELETIONS = """
CREATE TABLE deletions (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    created_at FLOAT NOT NULL,
    salt VARCHAR NOT NULL,
    tenant VARCHAR,
    session VARCHAR,
    tokenizer VARCHAR,
    "before" FLOAT,
    searched BOOLEAN NOT NULL
);
"""


def connected(location: str | Path) -> Database:
    database: Database = PostgresDatabase(location) if isinstance(location, str) else SqliteDatabase(location)
    database.connect()
    return database


def execute(folder: Path, script: str) -> None:
    folder.mkdir(exist_ok=True)
    with closing(sqlite3.connect(folder / DATABASE)) as connection:
        connection.executescript(script)


def first(folder: Path, script: str = FIRST) -> None:
    """A database of the first version with one sequence."""

    packed = zlib.compress(b"".join(token.to_bytes(4, "little") for token in (7, 40, 41, 42)), level=1).hex()
    key = Namespace("t").key
    values = f"(5, '{key}', 't', '', '', '', 's', 'w', NULL, 3, x'{packed}', 12.5, 2)"
    columns = "number, namespace, tenant, model_fingerprint, tokenizer_hash, template_hash, session, workflow, step"
    insert = f"INSERT INTO sequences ({columns}, token_count, tokens, created_at, hits) VALUES {values};"
    execute(folder, script + insert)


PARTITIONING = r"sequences_p\d+|sequences_number_key|ix_sequences_created_at"


def differences(connection: sa.Connection) -> list[object]:
    def compared(thing: object, name: str | None, *_: object) -> bool:  # partitions have tests of their own
        return connection.dialect.name == "sqlite" or not re.fullmatch(PARTITIONING, name or "sequences_number_key")

    options = {"version_table": revision.name, "include_object": compared}
    return [*compare_metadata(MigrationContext.configure(connection, opts=options), metadata)]


def test_the_newest_version_is_the_last_migration() -> None:
    script = ScriptDirectory(str(Path(str(migrations.__file__)).parent))
    assert script.get_current_head() == f"{VERSION:04}"
    assert [step.revision for step in script.walk_revisions()] == [f"{n:04}" for n in range(VERSION, 0, -1)]


@pytest.mark.parametrize("way", ["at once", "step by step"])
def test_both_ways_lead_to_the_same_tables(location: str | Path, way: str) -> None:
    database = connected(location)
    if way == "at once":
        prepare(database)
    else:
        with database.writing() as connection:
            upgrade(connection)
    with database.engine.connect() as connection:
        assert differences(connection) == []
        assert connection.execute(sa.select(revision.c.version_num)).scalars().all() == [f"{VERSION:04}"]
    prepare(database)
    database.close()


@pytest.mark.parametrize("script", [FIRST, FIRST + FIRST_DELETIONS])
def test_a_database_of_the_first_version_keeps_its_rows(tmp_path: Path, script: str) -> None:
    first(tmp_path, script)
    with SuffixCache.open(tmp_path, namespace="t") as cache:
        with cache.request([9, 7]) as request:
            assert request.draft(max_tokens=3).tokens.tolist() == [40, 41, 42]
            request.extend([40, 50])
        cache.flush()
        with SuffixCache.open(tmp_path, mode="follower", namespace="t") as follower:
            assert follower.stats().sequences == 2
    database = connected(tmp_path)
    with database.engine.connect() as connection:
        assert differences(connection) == []
        query = "SELECT id, number = 5, size = length(tokens), hits FROM sequences ORDER BY id"
        assert [tuple(row) for row in connection.exec_driver_sql(query)] == [(1, 1, 1, 3), (2, 0, 1, 0)]
    database.close()


SECOND = Path(__file__).parent / "version2.sql"  # a cache that release 2 of the tables wrote


def second(location: str | Path) -> None:
    """A database of the second version with four sequences."""
    if isinstance(location, Path):
        execute(location, SECOND.read_text())
        return
    database = connected(location)
    with database.writing() as connection:
        upgrade(connection, "0002")
        for line in SECOND.read_text().splitlines():
            if line.startswith('INSERT INTO "sequences"'):
                connection.exec_driver_sql(
                    line.replace("X'", r"'\x").replace("VALUES", "OVERRIDING SYSTEM VALUE VALUES")
                )
        connection.exec_driver_sql("SELECT setval(pg_get_serial_sequence('sequences', 'id'), 4)")
    database.close()


def test_a_database_of_the_second_version_is_migrated_and_goes_on(location: str | Path) -> None:
    second(location)
    for opening in range(2):
        with SuffixCache.open(location, namespace="t", mode="writer") as cache:
            assert cache.stats().sequences == 4 + opening
            for first, rest in ((40, [41, 42]), (50, [51, 52])):
                with cache.request([7, first], store=False) as request:
                    assert request.draft(max_tokens=2).tokens.tolist() == rest
            with cache.request([9], namespace="u") as request:
                request.extend([80 + opening, 90])
    store = SequenceStore.open(location, disk_bytes=None, mode="follower")
    assert {(one.namespace.tenant, one.sequences, one.tokens) for one in store.namespaces()} == {
        ("t", 2, 6),
        ("u", 4, 9),
    }
    numbers = [one.sequence for one in store.records()]
    assert all(number > 0 for number in numbers[:4]) and all(number < 0 for number in numbers[4:])
    store.close()


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


def test_a_migration_that_fails_leaves_everything_as_it_was(tmp_path: Path) -> None:
    first(tmp_path)
    execute(tmp_path, "CREATE TABLE holder (x); CREATE INDEX ix_sequences_tenant ON holder (x);")
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
        before = [*connection.iterdump()]
    for _ in range(2):
        database = connected(tmp_path)
        with pytest.raises(sa.exc.OperationalError, match="ix_sequences_tenant"):
            prepare(database)
        database.close()
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
        assert [*connection.iterdump()] == before
    execute(tmp_path, "DROP TABLE holder;")
    database = connected(tmp_path)
    prepare(database)
    database.close()


@pytest.mark.parametrize("old", [False, True])
def test_many_open_it_at_once(location: str | Path, old: bool) -> None:
    if old and isinstance(location, Path):
        first(location)
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
        assert differences(connection) == []
    database.close()


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (f"UPDATE agentspec_version SET version_num = '{VERSION + 1:04}'", "newer"),
        ("DROP TABLE agentspec_version; UPDATE agentspec_meta SET value = '9'", "newer"),
        ("DELETE FROM agentspec_version", "damaged"),
        ("UPDATE agentspec_version SET version_num = 'x'", "damaged"),
        ("DROP TABLE agentspec_version; DELETE FROM agentspec_meta", "damaged"),
        ("DROP TABLE agentspec_meta", "another program"),
    ],
)
def test_what_cannot_be_used_is_refused(location: str | Path, statement: str, said: str) -> None:
    database = connected(location)
    prepare(database)
    with database.writing() as connection:
        for part in statement.split("; "):
            connection.exec_driver_sql(part)
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
