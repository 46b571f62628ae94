"""The end of a process, a fork, and who is the writer after the writer: nothing is lost, nothing hangs."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import sqlalchemy as sa

from agentspec.cache import SuffixCache, lifetime
from agentspec.cache.lifetime import MaintenanceThread
from agentspec.cache.storage.database import Database
from agentspec.cache.storage.opening import open_database, prepare
from agentspec.cache.storage.schema import sequences
from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.errors import CacheLockedError

if TYPE_CHECKING:
    from conftest import Server


PRELUDE = """
import os, signal, sys, threading, time
import numpy as np
from agentspec.cache import SuffixCache
from agentspec.errors import CacheClosedError, CacheError

location = None if sys.argv[1] == "-" else sys.argv[1]
cache = SuffixCache.open(location)

def text(seed, length):
    return np.random.default_rng(seed).integers(0, 50, length).astype(np.int32)

def draft(seed):
    try:
        while True:
            with cache.request(text(seed, 30)) as request:
                for _ in range(5):
                    request.draft(32)
                    request.extend(text(seed, 3))
    except CacheClosedError:
        pass

def start(count):
    for seed in range(count):
        threading.Thread(target=draft, args=(seed,), daemon=True).start()
"""


def run(program: str, location: str | Path, expected: int = 0) -> str:
    command = [sys.executable, "-c", PRELUDE + program, str(location)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == expected, (done.returncode, done.stdout, done.stderr)
    assert "nanobind" not in done.stderr, done.stderr
    return done.stdout


def outputs(location: str | Path) -> list[list[int]]:
    store = SequenceStore.open(location, disk_bytes=None, mode="follower")
    found = [one.tokens.tolist() for one in store.records()]
    store.close()
    return found


DRAFTING = """
with cache.request([1, 2]) as request:
    request.extend(text(0, 20_000))
start(4)
time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 0.1)
"""


@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.long)])
def test_daemon_threads_that_draft_do_not_abort_the_end(tmp_path: Path, times: int) -> None:
    for turn in range(times):
        run(DRAFTING, "-" if turn % 2 else tmp_path)


@pytest.mark.slow
def test_threads_that_use_an_index_directly_neither(tmp_path: Path) -> None:
    program = """
from agentspec.cache.index import IndexDrafter, SuffixIndex, propose_batch
index, drafter = SuffixIndex(), IndexDrafter()
index.append(1, text(0, 50_000))
def work():
    while True:
        propose_batch([(drafter, [(index, 1)], text(1, 30), 32, 0.0, False)])
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
"""
    for _ in range(3):
        run(program, "-")


ENDS = {
    "end": ("", 0),
    "exit": ("sys.exit(3)", 3),
    "error": ("raise ValueError", 1),
    "thread": ("threading.Thread(target=lambda: (time.sleep(0.2), record(200))).start()", 0),
}


@pytest.mark.parametrize("how", ["end", *(pytest.param(how, marks=pytest.mark.slow) for how in ENDS if how != "end")])
def test_what_was_closed_is_not_lost_at_a_normal_end(location: str | Path, how: str) -> None:
    statement, expected = ENDS[how]
    program = f"""
def record(number):
    with cache.request([1, 2]) as request:
        request.extend([number, 1, 2])
for number in range(200):
    record(number)
{statement}
"""
    run(program, location, expected)
    count = 201 if how == "thread" else 200
    assert outputs(location) == [[number, 1, 2] for number in range(count)]


FORK = """
with cache.request([1, 2]) as request:
    request.extend([40, 41, 42])
cache.flush()
start(3)
held = cache.request([5, 6])
held.extend([7, 8])
time.sleep(0.2)
child = os.fork()
if child == 0:
    uses = [
        lambda: cache.request([1]), lambda: cache.forget(session="s"), lambda: held.draft(), lambda: held.extend([1]),
        cache.flush, cache.compact, cache.stats, cache.tenant_bytes, cache.check_integrity,
    ]
    if location is not None:
        uses.append(lambda: cache.responses.get("a", "r"))
    for use in uses:
        try:
            use()
        except CacheClosedError as error:
            assert f"opened by process {os.getppid()}; a forked process cannot use it" in str(error), error
        else:
            raise AssertionError("it did not raise")
    held.close()
    cache.close()
    assert cache.closed
    with SuffixCache.open(location) as own:
        server = location is not None and "://" in location
        assert own.stats().mode == ("follower" if server else "memory")
        if location is not None and not server:
            assert "open the cache after the fork" in own.stats().store_error
        with own.request([9]) as request:
            request.extend([90, 91])
    sys.exit(5)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 5, status
assert cache.stats().mode != "follower"
with cache.request([3]) as request:
    request.extend([50, 51])
cache.flush()
held.close()
cache.flush()
cache.close()
"""


@pytest.mark.parametrize("location", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)], indirect=True)
def test_a_forked_child_is_refused_and_disturbs_nothing(location: str | Path) -> None:
    run(FORK, location)
    found = outputs(location)
    for once in ([40, 41, 42], [50, 51], [7, 8]):
        assert found.count(once) == 1
    assert found.count([90, 91]) == isinstance(location, str)  # a server's database can be opened in the child too


@pytest.mark.slow
def test_a_cache_in_memory_neither() -> None:
    run(FORK, "-")


LEFT = """
cache.flush()
if os.fork() == 0:
    print("child", os.getpid(), flush=True)
    time.sleep(600)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_child_that_lives_on_does_not_keep_the_writers_part(location: str | Path) -> None:
    command = [sys.executable, "-c", PRELUDE + LEFT, str(location)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline().split()[1])
        try:
            with SuffixCache.open(location) as cache:
                assert cache.stats().mode == "follower"
                parent.kill()
                limit = time.monotonic() + 120
                while cache.stats().mode != "writer":
                    assert time.monotonic() < limit
                    time.sleep(0.05)
        finally:
            parent.kill()
            subprocess.run(["kill", "-9", str(child)], check=False)


def test_a_request_at_the_end_of_its_cache_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SuffixCache.open()
    close = cache._pool.close

    def late() -> None:
        cache._pool.namespaces.on_pressure()  # as a request does that is just being served
        close()

    monkeypatch.setattr(cache._pool, "close", late)
    cache.close()
    assert cache._maintenance is None


def test_the_thread_works_until_it_is_closed_and_tells_a_failure_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifetime, "_MAINTENANCE_SECONDS", 0.01)
    turns, enough = 0, threading.Event()

    def work() -> None:
        nonlocal turns
        turns += 1
        if turns >= 6:
            enough.set()
        if turns != 3:
            raise OSError("disk is gone")

    with caplog.at_level(logging.WARNING):
        thread = MaintenanceThread(work, lambda: None)
        assert enough.wait(10)
        thread.close()
        thread.close()
    done = turns
    assert [record.getMessage() for record in caplog.records] == 2 * ["looking after the cache failed: disk is gone"]
    assert not any(one.name == "agentspec-cache-maintenance" for one in threading.enumerate())
    assert turns == done


def test_the_thread_does_what_is_urgent_when_it_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetime, "_MAINTENANCE_SECONDS", 3600)
    done, urgent = [], threading.Event()
    thread = MaintenanceThread(lambda: done.append("work"), urgent.set)
    thread.wake()
    assert urgent.wait(10)
    thread.close()
    assert done == []


def wait(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)


def record(cache: SuffixCache, number: int, length: int) -> None:
    with cache.request([1, 2], session=f"s{number}") as request:
        request.extend(np.random.default_rng(number).integers(0, 2**31 - 2, length).astype(np.int32))


def count(location: str | Path) -> int:
    database = open_database(location)
    try:
        with database.engine.connect() as connection:
            return int(connection.execute(sa.select(sa.func.count()).select_from(sequences)).scalar_one())
    finally:
        database.close()


@pytest.mark.parametrize("location", ["sqlite", pytest.param("postgres", marks=pytest.mark.slow)], indirect=True)
def test_after_a_rolling_restart_the_second_process_does_the_writers_work(
    location: str | Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = SuffixCache.open(location, mode="writer")
    for number in range(500):
        record(first, number, 10)
    first.flush()
    with SuffixCache.open(location, retention=3600.0, disk_bytes=8 << 20) as second:
        assert (second.stats().mode, second.stats().sequences) == ("follower", 500)
        first.close()
        clock = SimpleNamespace(time=lambda: time.time() + 7200)  # from now on all are older, however long it took
        monkeypatch.setattr("agentspec.cache.deletion.time", clock)
        wait(lambda: second.stats().mode == "writer")
        wait(lambda: (second.stats().sequences, count(location)) == (0, 0))
        with pytest.raises(CacheLockedError):
            SuffixCache.open(location, mode="writer")


@pytest.mark.slow
def test_it_keeps_the_budget_and_writes_segments(location: str | Path) -> None:
    first = SuffixCache.open(location, mode="writer")
    limit = (1 << 20) + (0 if isinstance(location, Path) else 800_000)  # what PostgreSQL's partitions take when empty
    with SuffixCache.open(location, disk_bytes=limit) as second:
        for number in range(5):
            record(second, number, 40_000)
        second.flush()
        assert second.stats().disk_bytes > 1 << 19
        first.close()
        wait(lambda: second.stats().mode == "writer")
        for number in range(5, 10):
            record(second, number, 40_000)
        wait(lambda: 0 < count(location) < 10 and second.stats().disk_bytes <= limit)
    if isinstance(location, Path):
        with SuffixCache.open(location) as cache:
            assert cache.compact() > 0  # it is the writer
            assert list(location.glob("*.segment"))


HOLDER = """
import sys, time
from agentspec.cache import SuffixCache
cache = SuffixCache.open(sys.argv[1], mode="writer")
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_killed_writer_is_succeeded_and_only_by_one(location: str | Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(location)], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            caches = [SuffixCache.open(location) for _ in range(3)]
            caches.append(SuffixCache.open(location, mode="follower"))
            assert [cache.stats().mode for cache in caches] == ["follower"] * 4
        finally:
            holder.kill()

    def modes() -> list[str]:
        return [cache.stats().mode for cache in caches]

    for _ in range(3):
        wait(lambda: modes().count("writer") == 1)
        assert caches[-1].stats().mode == "follower"  # as it was asked to
        caches.pop(modes().index("writer")).close()
    assert modes() == ["follower"]
    caches.pop().close()


def candidates(location: str | Path, number: int) -> list[Database]:
    databases = []
    for _ in range(number):
        database = open_database(location)
        database.connect()
        prepare(database)
        with suppress(CacheLockedError):
            database.acquire_writer()
        databases.append(database)
    return databases


def test_a_lost_connection_moves_the_part_and_the_loser_knows(server: Server, postgres: str) -> None:
    first, second = candidates(postgres, 2)
    with closing(first), closing(second):
        for _ in range(3):
            assert (first.is_writer, second.is_writer) == (True, False)
            schema = f"hashtext('{postgres.rpartition('search_path%3D')[2]}')::bigint & 4294967295"
            holders = f"SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = ({schema})::oid AND granted"
            server.execute(f"SELECT pg_terminate_backend(pid, 60000) FROM ({holders}) AS holding")
            second.renew_lease()
            assert second.is_writer
            with first.writing() as connection:  # which has not noticed
                assert first.is_writer and not first.confirm_writer(connection)
            with second.writing() as connection:
                assert second.confirm_writer(connection)
            first.renew_lease()
            assert not first.is_writer
            first, second = second, first


def test_a_server_that_was_away_has_one_writer_again(server: Server, postgres: str) -> None:
    databases = candidates(postgres, 3)
    for _ in range(2):
        server.stop()
        for database in databases:
            with suppress(sa.exc.DBAPIError):
                database.renew_lease()
        server.start()
        for database in databases:
            with suppress(sa.exc.DBAPIError):  # the first use finds the old connection broken
                database.renew_lease()
            database.renew_lease()
        assert [database.is_writer for database in databases].count(True) == 1
    for database in databases:
        database.close()


def test_a_lock_file_that_was_deleted_or_replaced_is_noticed(tmp_path: Path) -> None:
    first, second = candidates(tmp_path, 2)
    with closing(first), closing(second):
        (tmp_path / "writer.lock").unlink()
        second.renew_lease()
        assert second.is_writer
        with first.writing() as connection:
            assert not first.confirm_writer(connection)
        first.renew_lease()
        assert not first.is_writer
        second.close()
        first.renew_lease()
        assert first.is_writer
