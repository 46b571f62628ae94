"""PostgreSQL: addresses, the writer, order, several nodes on one server, and a server that goes away for a while."""

from __future__ import annotations

import threading
import time
import uuid
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

from agentspec.cache import SuffixCache
from agentspec.errors import CacheError, CacheUnavailableError, ConfigurationError
from tests.cache.conftest import outputs, record, wait

if TYPE_CHECKING:
    from conftest import Server

SECRET = "hunter2-and-more"


# Addresses.


@pytest.mark.parametrize(
    "address",
    [
        f"mysql://user:{SECRET}@host/db",
        f"postgresql+asyncpg://user:{SECRET}@host/db",
        f"postgresql://user:{SECRET}@host:port/db",
        f"://{SECRET}",
    ],
)
def test_what_is_no_address_is_refused_without_its_password(address: str) -> None:
    with pytest.raises(ConfigurationError, match=r"path .*postgresql") as caught:
        SuffixCache.open(address)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "address", [f"postgresql://user:{SECRET}@127.0.0.1:1/db", f"postgresql://user@127.0.0.1:1/db?password={SECRET}"]
)
def test_no_server_is_told_without_the_password(address: str, caplog: pytest.LogCaptureFixture) -> None:
    for mode in ("writer", "follower"):
        with pytest.raises(CacheUnavailableError, match=r"user.*@127.0.0.1:1/db") as caught:
            SuffixCache.open(address, mode=mode)  # type: ignore[arg-type]
        assert SECRET not in str(caught.value)
    with SuffixCache.open(address) as cache:
        record(cache, [40, 41])
        stats = cache.stats()
        assert (stats.mode, stats.sequences) == ("memory", 1)
        assert stats.store_error is not None and "127.0.0.1:1" in stats.store_error
        with pytest.raises(CacheError, match="in memory only"):
            cache.flush()
        assert SECRET not in repr(stats)
    assert len(caplog.records) == 1
    assert SECRET not in caplog.text


# The writer.


def test_schemas_of_one_database_are_separate_caches(server: Server) -> None:
    one, two = server.address(), server.address()
    with SuffixCache.open(one, mode="writer") as first, SuffixCache.open(two, mode="writer") as second:
        record(first, [40, 41])
        first.flush()
        time.sleep(0.6)
        assert (first.stats().sequences, second.stats().sequences) == (1, 0)


def test_a_writer_that_lost_its_connection_is_succeeded_and_knows(server: Server, postgres: str) -> None:
    schema = f"hashtext('{postgres.rpartition('search_path%3D')[2]}')::bigint & 4294967295"
    holders = f"SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = ({schema})::oid AND granted"
    with SuffixCache.open(postgres) as one, SuffixCache.open(postgres) as other:
        for turn in range(3):
            server.execute(f"SELECT pg_terminate_backend(pid, 60000) FROM ({holders}) AS holding")
            wait(lambda: server.execute(holders) and "writer" in (one.stats().mode, other.stats().mode))
            for cache in (one, other):
                record(cache, [40 + turn, 41, 42])
                wait(lambda cache=cache: cache.stats().store_error is None)
                cache.flush()
        wait(lambda: sorted((one.stats().mode, other.stats().mode)) == ["follower", "writer"])
    assert len(outputs(postgres)) == 6


# Ids and their order.


def test_a_follower_misses_nothing_of_writers_that_commit_late(postgres: str) -> None:
    """A row gets its id at insert and is seen at commit: a follower that has seen an id has seen all smaller ones."""
    with ExitStack() as opened:
        follower = opened.enter_context(SuffixCache.open(postgres, mode="follower"))
        writers = [opened.enter_context(SuffixCache.open(postgres)) for _ in range(4)]

        def work(worker: int) -> None:
            for turn in range(30):
                record(writers[worker], [1000 * worker + turn, 7, 8], session=f"s{worker}")
                writers[worker].flush()

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait(lambda: follower.stats().sequences == 120)


# A server that goes away.


@pytest.mark.timeout(3600)
def test_drafting_goes_on_without_the_server_and_writing_when_it_is_back(
    server: Server,
    postgres: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with SuffixCache.open(postgres) as writer, SuffixCache.open(postgres) as follower:
        record(writer, [40, 41, 42], session="s")
        writer.flush()
        disk_bytes = writer.stats().disk_bytes
        server.stop()
        try:
            for turn in range(3):
                record(writer, [50 + turn, 60 + turn], session="forgotten later")
                record(follower, [70 + turn, 80 + turn])
            with pytest.raises(CacheError, match="tried again"):
                writer.flush()
            with pytest.raises(CacheError, match="nothing was forgotten"):
                writer.forget(session="s")
            with writer.request([9, 40], store=False) as request:
                assert request.draft(max_tokens=2).tokens.tolist() == [41, 42]
            lag = follower.stats().behind
            wait(lambda: follower.stats().behind > lag + 1)
            stats = writer.stats()
            assert stats.store_error is not None and stats.disk_bytes == disk_bytes
            wait(lambda: writer.stats().mode == "follower")  # the server holds no lock for it any more
        finally:
            server.start()
        wait(lambda: writer.stats().store_error is None)
        wait(lambda: "writer" in (writer.stats().mode, follower.stats().mode))
        for cache in (writer, follower):
            wait(lambda cache=cache: cache.stats().store_error is None)
            cache.flush()
            wait(lambda cache=cache: cache.stats().sequences == 7)
            assert cache.stats().unwritten == 0
        wait(lambda: follower.stats().behind < lag + 1 and follower.stats().unread == 0)
        assert writer.forget(session="forgotten later") == 3
    with SuffixCache.open(postgres) as cache:
        assert cache.stats().sequences == 4
    assert any("written again" in message for message in caplog.messages)


@pytest.mark.timeout(3600)
def test_what_was_forgotten_while_it_waited_to_be_written_is_not_written(server: Server, postgres: str) -> None:
    with SuffixCache.open(postgres) as one, SuffixCache.open(postgres) as other:
        server.stop()
        record(one, [40, 41], session="s")
        with pytest.raises(CacheError, match="tried again"):
            one.flush()
        server.start()
        wait(lambda: forgotten(other))
        wait(lambda: one.stats().store_error is None)
        wait(lambda: one.stats().sequences == 0)
        one.flush()
    with SuffixCache.open(postgres) as cache:
        assert cache.stats().sequences == 0


def forgotten(cache: SuffixCache) -> bool:
    try:
        cache.forget(session="s")
        return True
    except CacheError:
        return False


def test_no_byte_is_left_in_the_servers_tables(server: Server, postgres: str) -> None:
    canary = "canary-session-of-somebody"
    with SuffixCache.open(postgres) as cache:
        for turn in range(20):
            record(cache, list(range(turn, turn + 400)), session=f"{canary}-{turn}" if turn % 2 else "other")
        cache.flush()
        server.execute("ANALYZE", "CHECKPOINT")
        assert canary in tables(server)
        for turn in range(1, 20, 2):
            assert cache.forget(session=f"{canary}-{turn}") == 1
        server.execute("CHECKPOINT")
        assert canary not in tables(server)
        assert cache.stats().sequences == 10


def tables(server: Server) -> str:
    """All the bytes of all databases, the log for recovery left out."""
    files = [path for path in (server.folder / "base").rglob("*") if path.is_file()]
    return b"".join(path.read_bytes() for path in files).decode("latin-1")


def test_an_account_that_owns_nothing_writes_and_follows(server: Server, postgres: str) -> None:
    schema, role = postgres.rpartition("search_path%3D")[2], f"r{uuid.uuid4().hex}"
    with SuffixCache.open(postgres, mode="writer") as owner:
        server.execute(
            f"CREATE ROLE {role} LOGIN",
            f"GRANT USAGE ON SCHEMA {schema} TO {role}",
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role}",
            f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {role}",
        )
        address = sa.make_url(postgres).set(username=role).render_as_string(hide_password=False)
        with SuffixCache.open(address, mode="follower") as cache:
            with cache.request([1], session="s") as request:
                request.extend([40, 41])
            cache.flush()
            assert cache.forget(session="nobody") == 0
        assert owner.forget(session="s") == 1


# Several nodes.


CONNECTIONS = 6  # that one node keeps at the most: the writer's lock, and its threads' at work


def test_all_nodes_see_what_each_wrote_over_few_connections(server: Server, postgres: str) -> None:
    with ExitStack() as opened:
        nodes = [opened.enter_context(SuffixCache.open(postgres)) for _ in range(6)]
        assert [node.stats().mode for node in nodes] == ["writer", *["follower"] * 5]
        for number, node in enumerate(nodes):
            for turn in range(5):
                record(node, [100 * number + turn + 10, 7, 8, 9])
        for node in nodes:
            node.flush()
        wait(lambda: all(node.stats().sequences == 30 for node in nodes))
        taken = server.execute("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'")[0][0]
        assert taken - 1 <= CONNECTIONS * len(nodes)
        nodes[0].close()  # another becomes the writer
        wait(lambda: [node.stats().mode for node in nodes[1:]].count("writer") == 1)
