"""The sequences in PostgreSQL are divided by tenant: what is deleted, erased and read concerns one partition."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from agentspec.cache import SuffixCache
from agentspec.cache.deletion import select
from agentspec.cache.storage.migration import prepare, upgrade
from agentspec.cache.storage.migrations.partitions import COUNT, partitions_of
from agentspec.cache.storage.postgres import PostgresDatabase
from agentspec.cache.storage.schema import sequences
from agentspec.cache.storage.sequence_store import SequenceStore

if TYPE_CHECKING:
    from conftest import Server

TENANTS = [f"tenant {number}" for number in range(40)]
INSERT = """
INSERT INTO sequences (id, number, namespace, tenant, model_fingerprint, tokenizer_hash, template_hash, session,
                       token_count, tokens, created_at, hits, size)
SELECT 2 * n, -n, 'key ' || mod(n, 5), 'tenant ' || mod(n, 5), 'm', 't', 'x', 's', 1, 'bytes', 1e9 + n, mod(n, 3), 5
FROM generate_series(1, 100) AS n
"""


@pytest.fixture
def database(postgres: str) -> Iterator[PostgresDatabase]:
    opened = PostgresDatabase(postgres)
    yield opened
    opened.close()


def rows(database: PostgresDatabase, query: str) -> list[tuple[Any, ...]]:
    with database.engine.connect() as connection:
        return [tuple(row) for row in connection.exec_driver_sql(query)]


def fill(address: str, size: int = 400) -> None:
    with SuffixCache.open(address) as cache:
        for number, tenant in enumerate(TENANTS):
            with cache.request([number], namespace=tenant, session="s") as request:
                request.extend(list(range(number, number + size)))


def files(database: PostgresDatabase) -> dict[str, int]:
    """The file that each partition is in."""
    query = "SELECT relid::regclass::text, pg_relation_filenode(relid) FROM pg_partition_tree('sequences') WHERE isleaf"
    return dict(rows(database, query))


def test_rows_of_an_older_version_move_with_all_that_they_hold(postgres: str, database: PostgresDatabase) -> None:
    columns = ", ".join(column.name for column in sequences.columns)
    with database.writing() as connection:
        upgrade(connection, "0003")
        connection.exec_driver_sql(INSERT)
        connection.exec_driver_sql("SELECT setval('sequences_id_seq', 200)")
    kept, totals = f"SELECT {columns} FROM sequences ORDER BY id", "SELECT * FROM namespaces ORDER BY key"
    before = rows(database, kept), rows(database, totals)
    replicas = [PostgresDatabase(postgres) for _ in range(4)]
    opening = [threading.Thread(target=prepare, args=(replica,)) for replica in replicas]
    for thread in opening:
        thread.start()
    for thread in opening:
        thread.join()
    for replica in replicas:
        replica.close()
    assert (rows(database, kept), rows(database, totals)) == before
    assert len(files(database)) == COUNT and rows(database, "SELECT to_regclass('sequences_whole')") == [(None,)]
    with SuffixCache.open(postgres, namespace="new") as cache, cache.request([1]) as request:
        request.extend([2, 3])
    assert rows(database, "SELECT id, tenant FROM sequences WHERE id > 200") == [(201, "new")]
    assert rows(database, "SELECT sum(sequences) FROM namespaces") == [(101,)]


def test_division_leaves_owner_and_privileges_as_they_are(
    server: Server, postgres: str, database: PostgresDatabase
) -> None:
    schema, unique = postgres.rpartition("search_path%3D")[2], uuid.uuid4().hex
    owner, guest = f"o{unique}", f"g'\" {unique}".replace('"', '""')
    with database.writing() as connection:
        upgrade(connection, "0003")
    tables = [name for (name,) in rows(database, f"SELECT tablename FROM pg_tables WHERE schemaname = '{schema}'")]
    server.execute(
        f"CREATE ROLE {owner} LOGIN",
        f'CREATE ROLE "{guest}" LOGIN',
        f'GRANT USAGE ON SCHEMA {schema} TO {owner}, "{guest}"',
        *(f"ALTER TABLE {schema}.{name} OWNER TO {owner}" for name in tables),
        f'GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO "{guest}" WITH GRANT OPTION',
        f"GRANT DELETE ON {schema}.sequences TO PUBLIC",
    )
    acl = "SELECT relacl::text[] FROM pg_class WHERE oid = 'sequences'::regclass"
    [(before,)] = rows(database, acl)
    prepare(database)  # as a superuser, who owns none of it
    [(after,)] = rows(database, acl)
    assert sorted(after) == sorted(before)
    parts = "SELECT DISTINCT tableowner FROM pg_tables WHERE starts_with(tablename, 'sequences') AND schemaname = '{}'"
    assert rows(database, parts.format(schema)) == [(owner,)]
    assert rows(database, "SELECT pg_get_serial_sequence('sequences', 'id')") == [(f"{schema}.sequences_id_seq",)]


def test_each_partition_keeps_tokens_as_they_are_and_no_statistics(database: PostgresDatabase) -> None:
    prepare(database)
    query = """
        SELECT attrelid, attname, attstorage, coalesce(attstattarget, -1) FROM pg_attribute
        WHERE attrelid IN (SELECT relid FROM pg_partition_tree('sequences'))
        AND attname IN ('tenant', 'tokens', 'session')
    """
    found = rows(database, query)
    assert len(found) == 3 * (COUNT + 1)
    assert {(name, storage) for _, name, storage, _ in found if name == "tokens"} == {("tokens", "e")}
    assert {target for *_, target in found} == {0}


def test_a_tenants_deletion_writes_its_partition_anew_and_no_other(postgres: str, database: PostgresDatabase) -> None:
    fill(postgres)
    before = files(database)
    with database.engine.connect() as connection:
        mine = set(partitions_of(connection, [TENANTS[7]]))
    with SuffixCache.open(postgres) as cache:
        assert cache.forget(tenant=TENANTS[7]) == 1
        after = files(database)
        assert {name for name in before if after[name] != before[name]} == mine and len(mine) == 1
        cache.compact()
        assert all(node != after[name] for name, node in files(database).items())


@pytest.mark.slow
def test_what_many_forget_at_once_is_written_anew(postgres: str, database: PostgresDatabase) -> None:
    fill(postgres)
    store = SequenceStore.open(postgres, disk_bytes=None, mode="writer")
    before = files(database)

    def forget(tenant: str) -> None:
        store.forget(select(tenant=tenant))
        store.secure_erase()  # as maintenance does between the two, which writes nothing anew
        store.secure_erase(rewrite=True)

    threads = [threading.Thread(target=forget, args=(tenant,)) for tenant in TENANTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = files(database)
    store.secure_erase(rewrite=True)  # what gave way to another's lock
    assert all(files(database)[name] != node for name, node in before.items()) and set(after) == set(before)
    assert store.namespaces() == []
    store.close()


def test_sizes_are_those_of_all_partitions(postgres: str, database: PostgresDatabase, server: Server) -> None:
    fill(postgres, 4000)
    [(whole,)] = rows(database, "SELECT sum(size) FROM sequences")
    assert database.disk_bytes() > whole
    one, everything = database.rewritten_bytes([TENANTS[0]]), database.rewritten_bytes(None)
    assert 0 < one < everything <= database.disk_bytes()
    assert database.rewritten_bytes([]) < one
    assert database.rewritten_bytes(TENANTS) == everything


def test_an_account_that_owns_nothing_writes_and_follows(server: Server, postgres: str) -> None:
    schema, role = postgres.rpartition("search_path%3D")[2], f"r{uuid.uuid4().hex}"
    with SuffixCache.open(postgres, namespace="t", mode="writer") as owner:
        server.execute(
            f"CREATE ROLE {role} LOGIN",
            f"GRANT USAGE ON SCHEMA {schema} TO {role}",
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role}",
            f"REVOKE ALL ON {', '.join(f'{schema}.sequences_p{number}' for number in range(COUNT))} FROM {role}",
            f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {role}",
        )
        address = sa.make_url(postgres).set(username=role).render_as_string(hide_password=False)
        with SuffixCache.open(address, namespace="t", mode="follower") as cache:
            with cache.request([1], session="s") as request:
                request.extend([40, 41])
            cache.flush()
            assert cache.forget(session="nobody") == 0
        assert owner.forget(session="s") == 1


@given(st.lists(st.text(max_size=8), min_size=1, max_size=20, unique=True))
def test_partitions_are_found_by_name(shared: PostgresDatabase, tenants: list[str]) -> None:
    values: dict[str, object] = {"namespace": "n", "model_fingerprint": "", "tokenizer_hash": "", "template_hash": ""}
    values |= {"token_count": 0, "tokens": b"", "created_at": 0.0}
    with shared.engine.connect() as connection, connection.begin() as transaction:
        added = [{**values, "tenant": tenant, "number": number} for number, tenant in enumerate(tenants)]
        connection.execute(sequences.insert(), added)
        held = connection.exec_driver_sql("SELECT DISTINCT tableoid::regclass::text FROM sequences").scalars().all()
        assert set(partitions_of(connection, tenants)) == set(held)
        transaction.rollback()


@pytest.fixture(scope="module")
def shared(server: Server) -> Iterator[PostgresDatabase]:
    opened = PostgresDatabase(server.address())
    prepare(opened)
    yield opened
    opened.close()


def test_a_tenants_rows_are_looked_for_in_one_partition_and_old_ones_by_their_time(database: PostgresDatabase) -> None:
    prepare(database)
    mine = sa.select(sequences.c.id).where(sequences.c.tenant == "t", sequences.c.id > 3)
    old = sa.select(sequences.c.id).where((sequences.c.created_at < 5) | ~sequences.c.created_at.between(-1e12, 1e12))
    assert len(set(plan(database, mine, "sequences_p"))) == 1
    assert len(set(plan(database, old, "created_at_idx"))) == COUNT


def plan(database: PostgresDatabase, query: sa.Select[Any], named: str) -> list[str]:
    """The tables and indexes of that kind that a query looks at, where looking at all rows is to be avoided."""
    text = str(query.compile(database.engine, compile_kwargs={"literal_binds": True}))
    with database.engine.connect() as connection:
        connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
        connection.exec_driver_sql("SET LOCAL enable_indexscan = off")
        lines = connection.exec_driver_sql(f"EXPLAIN {text}".replace("%", "%%")).scalars().all()
    words = [word.strip("()") for line in lines for word in line.split()]
    return [word for word in words if named in word and (named != "sequences_p" or word.count("_") == 1)]
