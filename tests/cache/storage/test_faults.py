"""Kills, failing files and a full disk under a real cache: what `flush` acknowledged is there, nothing is invented."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentspec.cache import SuffixCache
from tests.cache.conftest import outputs

SLOW = pytest.mark.slow
LONG = [pytest.mark.long, pytest.mark.timeout(3600)]
KILLS = [2, pytest.param(200, marks=LONG)]
RECOVERIES = [1, pytest.param(4, marks=SLOW), pytest.param(50, marks=LONG)]
STRIDES = [61, pytest.param(7, marks=SLOW), pytest.param(1, marks=LONG)]


def stored(location: str | Path) -> list[list[int]]:
    SuffixCache.open(location).close()
    return outputs(location)


# S1, S2: kill -9 while writing, and again while opening.

INGEST = """
import sys
from agentspec.cache import SuffixCache
cache = SuffixCache.open(sys.argv[1])
turn = int(sys.argv[2])
print("open", flush=True)
while True:
    with cache.request([1, 2]) as request:
        request.extend([turn, turn + 1, turn + 2])
    turn += 1
    if turn % 3 == 0:
        cache.flush()
        print(turn, flush=True)
"""


def ingest(location: str | Path, start: int, seconds: float, *, opened: bool = True, written: bool = False) -> int:
    """Kill a process that writes that many seconds after it has opened the cache, or has started, or has written
    something; returns how many outputs it was told to be durable."""
    command = [sys.executable, "-c", INGEST, str(location), str(start)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if opened:
            assert process.stdout.readline() == "open\n"
        said = [process.stdout.readline().strip()] if written else []
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        said += process.stdout.read().split("\n")[:-1]
    return max((int(line) for line in said if line != "open"), default=start)


@pytest.mark.parametrize("location", ["sqlite", pytest.param("postgres", marks=SLOW)], indirect=True)
@pytest.mark.parametrize("times", KILLS)
def test_killed_while_writing(location: str | Path, times: int) -> None:
    generator = random.Random(times)
    turns = 0
    for number in range(times):
        durable = ingest(location, turns, generator.uniform(0, 0.5), written=number == 0)  # at least once
        rows = stored(location)
        assert len(rows) >= durable
        assert rows == [[turn, turn + 1, turn + 2] for turn in range(len(rows))]
        turns = len(rows)
    assert turns > 0


@pytest.mark.parametrize("times", RECOVERIES)
def test_killed_while_opening(tmp_path: Path, times: int) -> None:
    """The journal of a killed process is what the next one recovers from."""
    generator = random.Random(times)
    durable = ingest(tmp_path, 0, 0.3)
    for _ in range(times):
        ingest(tmp_path, 1 << 20, generator.uniform(0.2, 1.0), opened=False)
        rows = stored(tmp_path)
        first = [row for row in rows if row[0] < 1 << 20]
        assert len(first) >= durable
        assert first == [[turn, turn + 1, turn + 2] for turn in range(len(first))]


# S3, S6, S7: calls that fail. The process under test has its file functions replaced.


def run(preload: Path, program: str, folder: Path, *arguments: str) -> str:
    """What a program printed, having ended well."""
    faults = {"FAULT_FULL": str(folder / "full"), "FAULT_SYNC": str(folder / "failing")}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + program, str(folder), *arguments],
        env={**os.environ, **faults, "LD_PRELOAD": str(preload)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


PRELUDE = """
import ctypes, os, shutil, sys, time
from itertools import count
from pathlib import Path
from agentspec.cache import SuffixCache
from agentspec.errors import AgentSpecError, CacheError
folder = Path(sys.argv[1])
full, failing = folder / "full", folder / "failing"

def record(cache, turn, session="s"):
    with cache.request([1, 2], session=session) as request:
        request.extend([turn, turn + 1, turn + 2])

def durable(cache):
    try:
        cache.flush()
        return True
    except CacheError:
        return False

def outputs(path):
    with SuffixCache.open(path) as cache:
        assert cache.stats().mode == "writer", cache.stats()
    from tests.cache import conftest
    return conftest.outputs(path)

def drafts(cache, turn):
    with cache.request([2, turn], session="new", store=False) as request:
        return request.draft(max_tokens=2).tokens.tolist() == [turn + 1, turn + 2]
"""

NTH = """
clean = False
runs = 0
for n in count(1, int(sys.argv[2])):
    path = folder / str(n)
    ctypes.CDLL(None).fault_calls()
    os.environ["FAULT_AT"] = str(n)
    acknowledged, put = [], []
    with SuffixCache.open(path) as cache:
        for turn in range(10, 40, 10):
            record(cache, turn)
            put.append([turn, turn + 1, turn + 2])
            if durable(cache):
                acknowledged = list(put)
            assert drafts(cache, turn)
        try:
            cache.forget(session="nobody")
        except CacheError:
            pass
    calls = ctypes.CDLL(None).fault_calls()
    del os.environ["FAULT_AT"]
    rows = outputs(path)
    assert all(row in rows for row in acknowledged), (n, acknowledged, rows)
    assert all(row in put for row in rows) and len(rows) <= len(put), (n, rows)
    shutil.rmtree(path)
    runs += 1
    if calls < n:
        break
print(runs, n)
"""


@pytest.mark.parametrize("stride", STRIDES)
def test_the_nth_call_fails(preload: Path, tmp_path: Path, stride: int) -> None:
    runs, calls = map(int, run(preload, NTH, tmp_path, str(stride)).split())
    assert calls > 100 and runs > 100 // stride


FULL = """
path = folder / "cache"
cache = SuffixCache.open(path)
put = []
for point in range(4):
    for turn in range(5):
        record(cache, 1000 * point + 10 * turn, session=f"{point}")
        put.append(1000 * point + 10 * turn)
    if point % 3 == 0:
        assert durable(cache)
    full.touch()
    if point % 3 == 1:  # in the middle of writing everything anew
        try:
            cache.forget(session="nobody")
        except CacheError:
            pass
    record(cache, 1000 * point + 500, session=f"{point}")
    put.append(1000 * point + 500)
    assert not durable(cache)
    assert "full" in cache.stats().store_error
    assert drafts(cache, 1000 * point + 500)
    full.unlink()
    begun = time.monotonic()
    while cache.stats().store_error is not None:
        time.sleep(0.01)
        assert time.monotonic() - begun < 60
    assert durable(cache)
assert cache.stats().unwritten == 0
cache.close()
assert [row[0] for row in outputs(path)] == put
"""


def test_a_full_disk_is_waited_for(preload: Path, tmp_path: Path) -> None:
    run(preload, FULL, tmp_path)


FULL_WHILE_ERASING = """
path = folder / "cache"
with SuffixCache.open(path) as cache:
    record(cache, 10, session="canary")
    assert durable(cache)
    begun = time.monotonic()
    while cache.stats().erasure_pending:  # a killed process may have left bytes: what opens the cache looks
        time.sleep(0.01)
        assert time.monotonic() - begun < 60
    end = cache.on_forget(lambda scope: full.touch())  # once the deletion is committed
    assert cache.forget(session="canary") == 1
    assert cache.stats().erasure_pending
    end()
    full.unlink()
    cache.forget(session="nobody")
    assert not cache.stats().erasure_pending
assert not any(b"canary" in file.read_bytes() for file in path.iterdir() if file.is_file())
"""


def test_a_disk_too_full_to_erase_is_reported(preload: Path, tmp_path: Path) -> None:
    run(preload, FULL_WHILE_ERASING, tmp_path)


FULL_AT_START = """
full.touch()
with SuffixCache.open(folder / "cache") as cache:
    assert cache.stats().mode == "memory" and "full" in cache.stats().store_error
    record(cache, 10)
    assert drafts(cache, 10)
full.unlink()
assert outputs(folder / "cache") == []
"""


def test_a_disk_that_is_full_at_the_start(preload: Path, tmp_path: Path) -> None:
    run(preload, FULL_AT_START, tmp_path)


FAILS_AT_START = """
from sqlalchemy import event
import sqlalchemy as sa
from agentspec.errors import CacheUnavailableError

def fail(connection, cursor, statement, *_):  # the first transaction that writes cannot be made durable
    if "CREATE TABLE" in statement:
        failing.touch()

event.listen(sa.Engine, "before_cursor_execute", fail)
with SuffixCache.open(folder / "cache") as cache:
    assert cache.stats().mode == "memory" and "disk I/O" in cache.stats().store_error
    record(cache, 10)
    assert drafts(cache, 10)
try:
    SuffixCache.open(folder / "cache", mode="writer")
except CacheUnavailableError as error:
    assert "move it away" not in str(error)
event.remove(sa.Engine, "before_cursor_execute", fail)
failing.unlink()
assert outputs(folder / "cache") == []
"""


def test_a_disk_that_fails_at_the_start(preload: Path, tmp_path: Path) -> None:
    """Nothing is damaged then, and the advice is not to move it away."""
    run(preload, FAILS_AT_START, tmp_path)


SYNC = """
path = folder / "cache"
cache = SuffixCache.open(path)
record(cache, 10)
assert durable(cache)
failing.touch()
record(cache, 20)
assert not durable(cache)
failing.unlink()
time.sleep(0.5)
for turn in (30, 40):  # the next sync would succeed, without the pages that the kernel dropped
    record(cache, turn)
    assert not durable(cache)
    assert drafts(cache, turn)
assert "disk I/O" in cache.stats().store_error
assert cache.stats().unwritten >= 3
cache.close()
assert [10, 11, 12] in outputs(path)
"""


def test_after_a_failed_sync_nothing_is_acknowledged_any_more(preload: Path, tmp_path: Path) -> None:
    run(preload, SYNC, tmp_path)


# S11: a folder that cannot be written. Nobody keeps root from writing but the file system, so root becomes somebody.

NO_PERMISSION = """
import logging, os, sys
import agentspec.cache.storage.sequence_store  # which nobody may read
from agentspec.cache import SuffixCache
from agentspec.errors import CacheUnavailableError
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
logging.basicConfig(level="WARNING", format="WARNED %(message)s")
with SuffixCache.open(sys.argv[1]) as cache:
    for turn in range(3):
        with cache.request([1]) as request:
            request.extend([10 * turn, 10 * turn + 1])
    stats = cache.stats()
    assert (stats.mode, stats.sequences) == ("memory", 3), stats
    assert stats.store_error
for mode in ("writer", "follower"):
    try:
        SuffixCache.open(sys.argv[1], mode=mode)
    except CacheUnavailableError:
        continue
    raise AssertionError(mode)
"""


@pytest.mark.parametrize("made", [False, True])
def test_without_permission_it_starts_in_memory_and_warns_once(tmp_path: Path, made: bool) -> None:
    folder = tmp_path / "cache"
    if made:
        SuffixCache.open(folder).close()
        for file in folder.iterdir():
            file.chmod(0o444)
        folder.chmod(0o555)
    tmp_path.chmod(0o555)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    try:
        command = [sys.executable, "-c", NO_PERMISSION, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        tmp_path.chmod(0o755)
        if made:
            folder.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("WARNED") == 1, done.stderr
