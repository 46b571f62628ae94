"""The end of a process, and a fork: nothing is lost, nothing hangs, nothing is written twice."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentspec.cache import SuffixCache
from agentspec.cache.storage.sequence_store import SequenceStore

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
from agentspec.cache.index import IndexDrafter, SuffixIndex
index, drafter = SuffixIndex(), IndexDrafter()
index.append(1, text(0, 50_000))
def work():
    while True:
        drafter.draft([(index, 1)], text(1, 30))
        index.count([1, 2])
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


def test_a_cache_is_neither_pickled_nor_copied(tmp_path: Path) -> None:
    with SuffixCache.open(tmp_path) as cache, cache.request([1]) as request:
        for thing in (cache, request):
            for use in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(TypeError, match="cannot be pickled"):
                    use(thing)


def test_a_request_at_the_end_of_its_cache_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SuffixCache.open()
    close = cache._pool.close

    def late() -> None:
        cache._pool.namespaces.on_pressure()  # as a request does that is just being served
        close()

    monkeypatch.setattr(cache._pool, "close", late)
    cache.close()
    assert cache._maintenance is None
