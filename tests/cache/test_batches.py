"""Drafts of many requests in one call, and the threads that share its work: forks and the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.cache import SuffixCache
from agentspec.cache.index import IndexDrafter, SuffixIndex, propose_batch
from agentspec.types import Draft, Source


def same(one: Draft, other: Draft) -> bool:
    fields = ("tokens", "parents", "probabilities", "match_length", "source")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in fields)


@given(
    outputs=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=60), max_size=4),
    prompts=st.lists(st.lists(st.integers(0, 4), max_size=80), max_size=24),
    budgets=st.lists(st.integers(0, 80), min_size=24, max_size=24),
    min_probability=st.sampled_from([0.0, 0.01, 0.3]),
    namespaces=st.booleans(),
)
def test_a_batch_drafts_what_each_request_would(
    outputs: list[list[int]], prompts: list[list[int]], budgets: list[int], min_probability: float, namespaces: bool
) -> None:
    with SuffixCache.open() as cache:
        for output in outputs:
            with cache.request([7]) as request:
                request.extend(output)
        requests = [
            cache.request(prompt, session=str(number), namespace=str(number % 3) if namespaces else "default")
            for number, prompt in enumerate(prompts)
        ]
        budgets = budgets[: len(prompts)]
        alone = [r.draft(budget, min_probability) for r, budget in zip(requests, budgets, strict=True)]
        jobs = [
            (r.drafter, r.indexes, r.context, budget, min_probability, False)
            for r, budget in zip(requests, budgets, strict=True)
        ]
        together = propose_batch(jobs)
        assert len(together) == len(requests)
        assert all(same(one, other) for one, other in zip(alone, together, strict=True))


def test_many_threads_draft_as_one() -> None:
    """More than any machine's share of tokens for each of several threads, beside a thread that appends."""
    rng = np.random.default_rng(0)
    index, drafter = SuffixIndex(), IndexDrafter()
    index.append(0, rng.integers(0, 20, 20_000).astype(np.int32))
    contexts = [rng.integers(0, 20, 64).astype(np.int32) for _ in range(200)]
    alone = [propose_batch([(drafter, [(index, Source.SHARED)], context, 64, 0.0, False)])[0] for context in contexts]
    together = propose_batch([(drafter, [(index, Source.SHARED)], context, 64, 0.0, False) for context in contexts])
    assert sum(map(len, together)) > 5000
    assert all(same(one, other) for one, other in zip(alone, together, strict=True))


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
def test_threads_end_with_their_batch_and_a_forked_child_starts_its_own() -> None:
    run("""
few, many = jobs(4), jobs(16)
propose_batch(few)
assert threads() == 1
before = tokens(propose_batch(many))
child = os.fork()
assert threads() == 1
assert tokens(propose_batch(many)) == before and threads() == 1
if child:
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status
""")


@several
def test_no_signal_is_handled_in_them() -> None:
    run("""
handled = []
signal.signal(signal.SIGUSR1, lambda *_: handled.append(1))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
many = jobs(400)
watch = threading.Thread(target=lambda: propose_batch(many))
watch.start()
os.kill(os.getpid(), signal.SIGUSR1)
watch.join()
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
