from __future__ import annotations

import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from agentspec.cache import SuffixCache
from agentspec.cache.storage.opening import prepare
from agentspec.cache.storage.postgres import PostgresDatabase
from agentspec.cache.storage.schema import sequences
from agentspec.errors import CacheError, CacheLockedError, CacheUnavailableError, ConfigurationError

if TYPE_CHECKING:
    from conftest import Server

SECRET = "hunter2-and-more"


def record(cache: SuffixCache, prompt: list[int], output: list[int], **labels: str) -> None:
    with cache.request(prompt, **labels) as request:
        request.extend(output)


def wait(condition: Any, seconds: float = 240.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)


@pytest.fixture
def looked_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], bool]], None]:
    """Wait for something that the caches' own threads bring about: in vain if they have looked after the caches for 800
    times since, which two caches do in some minutes, or in many more on a machine that has no time for them.
    """
    rounds, maintain = [0], SuffixCache._maintain

    def counted(cache: SuffixCache) -> None:
        rounds[0] += 1
        maintain(cache)

    monkeypatch.setattr(SuffixCache, "_maintain", counted)

    def wait_for(condition: Callable[[], bool]) -> None:
        limit = rounds[0] + 800
        while not condition():
            assert rounds[0] < limit, "waited in vain"
            time.sleep(0.02)

    return wait_for


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
        record(cache, [1], [40, 41])
        stats = cache.stats()
        assert (stats.mode, stats.sequences) == ("memory", 1)
        assert stats.store_error is not None and "127.0.0.1:1" in stats.store_error
        with pytest.raises(CacheError, match="in memory only"):
            cache.flush()
        assert SECRET not in repr(stats)
    assert len(caplog.records) == 1
    assert SECRET not in caplog.text


# The writer.

HOLDER = """
import sys, time
from agentspec.cache import SuffixCache
cache = SuffixCache.open(sys.argv[1], mode="writer")
print("held", flush=True)
time.sleep(60)
"""


def test_the_writer_is_named_and_does_not_block_when_killed(postgres: str) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, postgres], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            with pytest.raises(CacheLockedError, match=rf"process {holder.pid} on \S+; open it as a follower"):
                SuffixCache.open(postgres, mode="writer")
            with SuffixCache.open(postgres) as cache:
                assert cache.stats().mode == "follower"
                assert cache.path is None
        finally:
            holder.kill()

    def writer() -> bool:
        try:
            SuffixCache.open(postgres, mode="writer").close()
            return True
        except CacheLockedError:
            return False

    wait(writer)


def test_the_next_writer_need_not_wait_until_the_server_notices_the_end(
    postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = PostgresDatabase(postgres), PostgresDatabase(postgres)
    first.acquire_writer()
    lease = first._lease
    assert lease is not None
    close = lease.close

    def acquire_and_close() -> None:
        second.acquire_writer()
        close()

    monkeypatch.setattr(lease, "close", acquire_and_close)
    first.close()
    assert second.is_writer
    second.close()


def test_schemas_of_one_database_are_separate_caches(server: Server) -> None:
    one, two = server.address(), server.address()
    with SuffixCache.open(one, mode="writer") as first, SuffixCache.open(two, mode="writer") as second:
        record(first, [1], [40, 41])
        first.flush()
        time.sleep(0.6)
        assert (first.stats().sequences, second.stats().sequences) == (1, 0)


# Ids and their order.


def test_who_has_seen_an_id_has_seen_all_smaller_ones(postgres: str) -> None:
    """Writers that commit late would otherwise appear behind a reader's back."""
    database = PostgresDatabase(postgres)
    prepare(database)
    values = {"namespace": "n", "tenant": "t", "model_fingerprint": "", "tokenizer_hash": "", "template_hash": ""}
    values |= {"token_count": 0, "tokens": b"", "created_at": 0.0}
    stop = threading.Event()

    def work(worker: int) -> None:
        number = worker << 32
        while not stop.is_set():
            with database.writing() as connection:
                connection.execute(sequences.insert().values(**values, number=number))
                time.sleep(0.001 * (worker % 3))
            number += 1

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    seen: list[int] = []
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        while len(seen) < 100:
            query = sa.select(sequences.c.id).where(sequences.c.id > max(seen, default=0)).order_by(sequences.c.id)
            seen += connection.execute(query).scalars()
    stop.set()
    for thread in threads:
        thread.join()
    with database.engine.connect() as connection:
        query = sa.select(sequences.c.id).where(sequences.c.id <= seen[-1]).order_by(sequences.c.id)
        assert connection.execute(query).scalars().all() == seen
    database.close()


# A server that goes away.


@pytest.mark.timeout(3600)
def test_drafting_goes_on_without_the_server_and_writing_when_it_is_back(
    server: Server,
    postgres: str,
    caplog: pytest.LogCaptureFixture,
    looked_after: Callable[[Callable[[], bool]], None],
) -> None:
    with SuffixCache.open(postgres) as writer, SuffixCache.open(postgres) as follower:
        record(writer, [1], [40, 41, 42], session="s")
        writer.flush()
        disk_bytes = writer.stats().disk_bytes
        server.stop()
        try:
            for turn in range(3):
                record(writer, [1], [50 + turn, 60 + turn], session="forgotten later")
                record(follower, [1], [70 + turn, 80 + turn])
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
            looked_after(lambda: writer.stats().mode == "follower")  # the server holds no lock for it any more
        finally:
            server.start()
        looked_after(lambda: writer.stats().store_error is None)
        looked_after(lambda: "writer" in (writer.stats().mode, follower.stats().mode))
        for cache in (writer, follower):
            looked_after(lambda cache=cache: cache.stats().store_error is None)
            cache.flush()
            looked_after(lambda cache=cache: cache.stats().sequences == 7)
            assert cache.stats().unwritten == 0
        looked_after(lambda: follower.stats().behind < lag + 1 and follower.stats().unread == 0)
        assert writer.forget(session="forgotten later") == 3
    with SuffixCache.open(postgres) as cache:
        assert cache.stats().sequences == 4
    assert any("written again" in message for message in caplog.messages)


@pytest.mark.timeout(3600)
def test_what_was_forgotten_while_it_waited_to_be_written_is_not_written(
    server: Server, postgres: str, looked_after: Callable[[Callable[[], bool]], None]
) -> None:
    with SuffixCache.open(postgres) as one, SuffixCache.open(postgres) as other:
        server.stop()
        record(one, [1], [40, 41], session="s")
        with pytest.raises(CacheError, match="tried again"):
            one.flush()
        server.start()
        looked_after(lambda: forgotten(other))
        looked_after(lambda: one.stats().store_error is None)
        looked_after(lambda: one.stats().sequences == 0)
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
            record(cache, [1], list(range(turn, turn + 400)), session=f"{canary}-{turn}" if turn % 2 else "other")
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
