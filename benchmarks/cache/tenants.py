"""What thousands of tenants cost each other: an empty namespace, a request beside others, opening, and overflow."""

from __future__ import annotations

import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean, median

from agentspec.benchmarks.cache.synthetic_text import synthetic_tokens
from agentspec.benchmarks.report import Progress
from agentspec.cache import SuffixCache
from agentspec.cache.tokens import Tokens

_ROUNDS, _REQUESTS = 9, 40  # of the comparison with one tenant, interleaved
_OUTPUT = 200  # tokens
_LAZY = 100_000  # tokens of the namespace that is loaded by its first request
_BUDGET = 16 << 20  # bytes that one tenant overflows
_MEMORY = 8 << 30  # never reached
_CLOSES = 200
_PROMPT = [1, 2, 3]


@dataclass(frozen=True, slots=True)
class Tenancy:
    """Times in seconds; all but `open_seconds` and `first_draft_seconds` are processor time of the calling thread."""

    tenants: int
    empty_bytes: float  # of a namespace that was asked for once, as the budget counts it
    request_ratio: float  # a request beside `tenants` tenants, relative to one that is alone
    open_seconds: float  # a folder with so many namespaces
    first_draft_seconds: float  # request and draft in a namespace of 100,000 tokens that was not loaded
    worst_close: float  # of another tenant, while one overflows
    median_close: float
    budget_share: float  # of the memory budget in use while it overflows, on average
    budget_most: float  # the most of it


def measure_tenancy(tenants: int, progress: Progress) -> Tenancy:
    """Measure everything with `tenants` tenants (17 or more: some namespaces are loaded at once)."""
    progress(f"serving {tenants:,} tenants")
    empty, ratio = _many(tenants)
    progress(f"opening {tenants:,} namespaces")
    with tempfile.TemporaryDirectory(prefix="agentspec-bench-") as folder:
        opened, first = _opening(Path(folder), tenants)
    progress("overflowing the memory budget")
    closes, shares = _overflow()
    return Tenancy(
        tenants=tenants,
        empty_bytes=empty,
        request_ratio=ratio,
        open_seconds=opened,
        first_draft_seconds=first,
        worst_close=max(closes),
        median_close=median(closes),
        budget_share=fmean(shares),
        budget_most=max(shares),
    )


def _many(tenants: int) -> tuple[float, float]:
    """(bytes of an empty namespace, cost of a request beside `tenants` tenants relative to one alone)."""
    with SuffixCache.open(memory_bytes=_MEMORY) as alone, SuffixCache.open(memory_bytes=_MEMORY) as crowd:
        for number in range(tenants):
            crowd.request(_PROMPT, namespace=f"tenant-{number}", store=False).close()
        empty = crowd.stats().memory_bytes / tenants
        text = synthetic_tokens(2 * _ROUNDS * _REQUESTS * _OUTPUT)
        outputs = (text[at : at + _OUTPUT] for at in range(0, len(text), _OUTPUT))
        ratios = []
        for _ in range(_ROUNDS):
            mine = [next(outputs) for _ in range(_REQUESTS)]
            ratios.append(_requests(crowd, mine) / _requests(alone, mine))
    return empty, median(ratios)


def _requests(cache: SuffixCache, outputs: list[Tokens]) -> float:
    start = time.thread_time()
    for output in outputs:
        _record(cache, output, "one")
    return time.thread_time() - start


def _record(cache: SuffixCache, output: Tokens, tenant: str) -> float:
    """Processor time that the close of a request took."""
    request = cache.request(_PROMPT, namespace=tenant, session="s")
    for at in range(0, len(output), 10):
        request.draft(16)
        request.extend(output[at : at + 10])
    start = time.thread_time()
    request.close()
    return time.thread_time() - start


def _opening(folder: Path, tenants: int) -> tuple[float, float]:
    text = synthetic_tokens(_LAZY)
    with SuffixCache.open(folder, memory_bytes=_MEMORY) as cache:
        for at in range(0, _LAZY, 500):
            with cache.request(_PROMPT, namespace="large") as request:
                request.extend(text[at : at + 500])
        for number in range(tenants):
            with cache.request(_PROMPT, namespace=f"tenant-{number}") as request:
                request.extend(text[number : number + 50])
        cache.compact()
    start = time.perf_counter()
    with SuffixCache.open(folder, memory_bytes=_MEMORY) as cache:
        opened = time.perf_counter() - start
        start = time.perf_counter()
        with cache.request(text[:64], namespace="large", store=False) as request:
            request.draft(16)
        return opened, time.perf_counter() - start


def _overflow() -> tuple[list[float], list[float]]:
    """(seconds of another tenant's closes, shares of the budget in use), while a tenant overflows the budget."""
    done, full = threading.Event(), threading.Event()
    text = synthetic_tokens(1 << 21, seed=5)
    shares = []

    def flood() -> None:
        for number in count():
            at = number * 1000 % (len(text) - 1000)
            with cache.request(_PROMPT, namespace="flood", session=f"s{number % 50}") as request:
                request.extend(text[at : at + 1000])
            if cache.stats().evicted:
                full.set()
                shares.append(cache.stats().memory_bytes / _BUDGET)
            if done.is_set():
                return

    with SuffixCache.open(memory_bytes=_BUDGET) as cache:
        thread = threading.Thread(target=flood)
        thread.start()
        full.wait()
        closes = [_record(cache, text[at : at + _OUTPUT], "quiet") for at in range(0, _CLOSES * _OUTPUT, _OUTPUT)]
        done.set()
        thread.join()
    return closes, shares
