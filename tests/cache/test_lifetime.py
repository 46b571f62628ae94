"""The end of a process, a fork, and who is the writer after the writer: nothing is lost, nothing hangs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentspec.cache import SuffixCache
from agentspec.errors import CacheLockedError
from tests.cache.conftest import SQLITE_FIRST, outputs, record, text, wait

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


@SQLITE_FIRST
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


@SQLITE_FIRST
def test_after_a_rolling_restart_the_second_process_does_the_writers_work(
    location: str | Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = SuffixCache.open(location, mode="writer")
    for number in range(500):
        record(first, text(number, 10), session=f"s{number}")
    first.flush()
    with SuffixCache.open(location, retention=3600.0, disk_bytes=8 << 20) as second:
        assert (second.stats().mode, second.stats().sequences) == ("follower", 500)
        first.close()
        clock = SimpleNamespace(time=lambda: time.time() + 7200)  # from now on all are older, however long it took
        monkeypatch.setattr("agentspec.cache.deletion.time", clock)
        wait(lambda: second.stats().mode == "writer")
        wait(lambda: (second.stats().sequences, len(outputs(location))) == (0, 0))
        with pytest.raises(CacheLockedError):
            SuffixCache.open(location, mode="writer")


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
