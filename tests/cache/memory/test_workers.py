"""The threads that share the work of a batch: when they begin, what a fork and the end of the process make of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PRELUDE = """
import os, signal, sys, threading, time
import numpy as np
from agentspec.cache.index import IndexDrafter, SuffixIndex, propose_batch

rng = np.random.default_rng(0)

def jobs(count, budget=64):
    index, drafter = SuffixIndex(), IndexDrafter()
    index.append(0, rng.integers(0, 20, 20_000).astype(np.int32))
    contexts = [rng.integers(0, 20, 64).astype(np.int32) for _ in range(count)]
    return [(drafter, [(index, 1)], context, budget, 0.0, False) for context in contexts]

def tokens(drafts):
    return [draft.tokens.tolist() for draft in drafts]

def threads():
    return len(os.listdir("/proc/self/task"))

def keep_drafting():
    mine = jobs(16)
    def work():
        while True:
            propose_batch(mine)
    threading.Thread(target=work, daemon=True).start()
"""

several = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="missed: needs Linux and two cores"
)


def run(program: str) -> None:
    command, alone = [sys.executable, "-c", PRELUDE + program], {"OMP_NUM_THREADS": "1"}  # no threads of NumPy's own
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, **alone}
    )
    assert (done.returncode, done.stderr) == (0, ""), (done.returncode, done.stderr)


@several
def test_they_begin_with_the_first_batch_that_is_large_and_a_fork_begins_anew() -> None:
    run("""
few, many = jobs(4), jobs(16)
propose_batch(few)
assert threads() == 1
before = tokens(propose_batch(many))
started = threads()
assert started > 1
assert tokens(propose_batch(many)) == before and threads() == started
for depth in range(2):
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, status
        break
    assert threads() == 1
    assert tokens(propose_batch(many)) == before and threads() == started
assert tokens(propose_batch(many)) == before and threads() == started
""")


@several
def test_no_signal_is_handled_in_them() -> None:
    run("""
handled = []
signal.signal(signal.SIGUSR1, lambda *_: handled.append(1))
propose_batch(jobs(16))
assert threads() > 1
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(0.05)
assert signal.SIGUSR1 in signal.sigpending() and not handled
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
assert handled
""")


@pytest.mark.parametrize("forks", [5, pytest.param(200, marks=pytest.mark.long)])
def test_a_fork_in_the_middle_of_batches(forks: int) -> None:
    run(f"""
for _ in range(3):
    keep_drafting()
for _ in range({forks}):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        mine = jobs(16)  # locks of the parent's may never be free
        assert tokens(propose_batch(mine)) == tokens([propose_batch([job])[0] for job in mine])
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7, status
""")


@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.long)])
def test_the_end_in_the_middle_of_batches(times: int) -> None:
    for _ in range(times):
        run("""
for _ in range(3):
    keep_drafting()
time.sleep(0.1)
""")


@pytest.mark.slow
def test_a_process_without_further_threads_works_alone() -> None:
    run("""
import resource
many = jobs(16)
before = tokens([propose_batch([job])[0] for job in many])
limit = threads()
os.setuid(65534) if os.getuid() == 0 else None
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
assert tokens(propose_batch(many)) == before and threads() == limit
""")
