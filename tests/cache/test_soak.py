"""Many readers beside a writer, and more text than fits. Short here; `pytest -m long` runs the full lengths."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from agentspec.cache import SuffixCache
from agentspec.cache.tokens import Tokens

READERS = 16
LENGTH = 50


def walk(number: int) -> Tokens:
    """Output `number`: after a token comes the next higher one, as long as both are of the same output."""
    return np.arange(LENGTH, dtype=np.int32) + 10 + LENGTH * number


def assert_whole(context: int, draft: list[tuple[int, int]]) -> None:
    """Every drafted token goes on from its parent as some output did, which is what reading one by one would find."""
    tokens = [token for token, _ in draft]
    for token, parent in draft:
        before = context if parent < 0 else tokens[parent]
        assert token == before + 1
        assert (token - 10) % LENGTH != 0


def together(*works: Callable[[], None]) -> None:
    """Run each in a thread of its own; raises what the first of them raised."""
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=900)
        assert not thread.is_alive(), "a deadlock"
    if failures:
        raise failures[0]


@pytest.mark.parametrize("seconds", [1, pytest.param(600, marks=[pytest.mark.long, pytest.mark.timeout(1000)])])
def test_no_reader_ever_sees_a_torn_text(seconds: int) -> None:
    until, written, drafted = time.monotonic() + seconds, [1], [0] * READERS
    with SuffixCache.open(memory_bytes=4 << 20) as cache:

        def write() -> None:
            while time.monotonic() < until or written[0] <= 50:
                with cache.request([1, 2, 3], session=f"w{written[0] % 20}") as request:
                    request.extend(walk(written[0]))
                written[0] += 1

        def read(reader: int) -> None:
            rng = np.random.default_rng(reader)
            while time.monotonic() < until or not drafted[reader]:
                output = walk(written[0] - int(rng.integers(min(written[0], 200))))
                end = int(rng.integers(1, LENGTH))
                request = cache.request(output[:end], session=f"r{reader}", store=False)
                draft = request.draft(max_tokens=16)
                assert_whole(
                    int(output[end - 1]), list(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True))
                )
                drafted[reader] += len(draft)
                request.abandon()

        together(write, *(lambda reader=reader: read(reader) for reader in range(READERS)))  # type: ignore[misc]
        cache.check_integrity()
        assert cache.stats().evicted > 0 or seconds < 60


PROMPT, OUTPUT = 64, 236  # tokens

CHURN = """
import sys
import numpy as np
from agentspec.cache import SuffixCache

def private():
    with open("/proc/self/smaps_rollup") as lines:
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))

def churn(cache, outputs):
    rng, most, counted = np.random.default_rng(0), 0, []
    for number in range(outputs):
        text = rng.integers(0, 50_000, prompt + output, dtype=np.int32)
        with cache.request(text[:prompt], session=f"s{number % 50}") as request:
            request.draft(8)
            request.extend(text[prompt:])
        namespaces = cache._pool.namespaces
        if namespaces.evicted:
            counted.append(namespaces.total / budget)
        if number % 100 == 0:
            most = max(most, private())
    return most, counted

budget, outputs, prompt, output = map(int, sys.argv[1:])
with SuffixCache.open(memory_bytes=1 << 20) as cache:
    churn(cache, 40)  # everything that any use loads
empty = private()
with SuffixCache.open(memory_bytes=budget) as cache:
    most, counted = churn(cache, outputs)
    print((most - empty) / budget, cache.stats().evicted, np.mean(counted), max(counted))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="missed: private bytes are read from /proc")
@pytest.mark.parametrize(
    ("budget", "outputs"),
    [
        pytest.param(8 << 20, 6_000, marks=pytest.mark.slow),
        pytest.param(20 << 20, 33_000, marks=[pytest.mark.long, pytest.mark.timeout(1000)]),
    ],
)
def test_a_process_takes_no_more_than_its_budget(budget: int, outputs: int) -> None:
    command = [sys.executable, "-c", CHURN, *map(str, (budget, outputs, PROMPT, OUTPUT))]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    used, evicted, mean, most = map(float, run.stdout.split())
    assert evicted >= outputs - budget / (8 * OUTPUT)  # a token takes 4 bytes in the log and 4 in a run, at least
    assert 0.9 <= mean < most <= 1  # by the cache's own count
    assert used <= 1.1
