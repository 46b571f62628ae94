"""Costs of the cache: seconds per draft, per recorded token, per prompt token and to open it, and bytes per token.

All text is synthetic, so that no data is needed and the work never varies. Calls are made from Python, as users do.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from agentspec.benchmarks.report import Progress
from agentspec.cache import SuffixCache
from agentspec.cache.index import SuffixIndex
from agentspec.cache.tokens import EMPTY, Tokens
from agentspec.types import Draft

VOCABULARY = 49_152
_SPAN = (8, 200)  # tokens copied at a time
_GAP = 20.0  # mean number of new tokens between two copies


def synthetic_tokens(count: int, *, seed: int = 0) -> Tokens:
    """`count` tokens that depend only on `seed`. About five in six are copied; new tokens are skewed to few ids."""
    rng = np.random.default_rng(seed)
    text = (VOCABULARY * rng.random(count) ** 4).astype(np.int32)
    spans = 2 + int(count / (_GAP + sum(_SPAN) / 2) * 1.2)
    lengths = rng.integers(*_SPAN, size=spans).tolist()
    gaps = rng.geometric(1 / _GAP, size=spans).tolist()
    sources = rng.random(spans).tolist()
    at = 0
    for length, gap, source in zip(lengths, gaps, sources, strict=True):
        at += gap
        begin = int(source * max(0, at - length))
        copied = text[begin : begin + min(length, at - begin, max(0, count - at))]
        text[at : at + len(copied)] = copied
        at += len(copied)
    return text


CACHED = 1_000_000
TREE = 32
_OUTPUT = 500  # tokens of one cached output
_STEP = 4  # tokens committed at a time
_MEASURED, _WARMUP = 3000, 300  # drafts
_PROMPT, _TURN = 50_000, 250  # tokens of a long prompt, and what each turn adds
_MEMORY = 8 << 30  # never reached: eviction would change what is measured
_BYTES_PER_TOKEN = 40  # at most, while runs merge and are saved


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds per draft, over `drafts` drafts, and the mean size of the drafted trees."""

    cached_tokens: int
    drafts: int
    tree: float
    median: float
    p99: float
    longest: float

    @classmethod
    def of(cls, cached_tokens: int, seconds: Sequence[float], sizes: Sequence[int]) -> Latency:
        middle, late = np.percentile(seconds, [50, 99])
        return cls(cached_tokens, len(seconds), float(np.mean(sizes)), float(middle), float(late), max(seconds))


@dataclass(frozen=True, slots=True)
class Costs:
    """Times in seconds, sizes in bytes; `insert` and `record` per token, `request_start` per prompt token."""

    draft: Latency
    insert: float  # adding an output to the cached past outputs, merges included
    record: float  # all work for an output token: learning, session, cached past outputs
    request_start: float
    memory_bytes: float  # per token of the cached past outputs
    disk_bytes: float  # per token in the database
    opened_tokens: int
    open_seconds: float  # from opening a cache on disk to its first draft
    segment_bytes: float | None = None  # per token in a segment


@dataclass(frozen=True, slots=True)
class Opening:
    """Seconds from opening a cache to its first draft, and bytes per token in its database and its segments."""

    seconds: float
    database: float
    segments: float


def measure_costs(opened: int, progress: Progress, *, cached: int = CACHED) -> Costs:
    """Measure everything with `cached` tokens in memory and `opened` tokens on disk."""
    text = synthetic_tokens(cached)
    progress(f"inserting {cached:,} tokens")
    insert, memory_bytes = insert_cost(text)
    progress("starting requests")
    request_start = request_start_cost()
    with tempfile.TemporaryDirectory(prefix="agentspec-bench-") as folder:
        progress(f"recording {cached:,} tokens")
        with SuffixCache.open(memory_bytes=_MEMORY) as cache:
            record = record_cost(cache, text)
            progress("drafting")
            draft = draft_latency(cache)
        progress(f"writing {opened:,} tokens")
        opening = open_cost(Path(folder), opened)
    return Costs(
        draft=draft,
        insert=insert,
        record=record,
        request_start=request_start,
        memory_bytes=memory_bytes,
        disk_bytes=opening.database,
        opened_tokens=opened,
        open_seconds=opening.seconds,
        segment_bytes=opening.segments,
    )


def insert_cost(text: Tokens) -> tuple[float, float]:
    """(seconds, bytes) per token of adding `text` to an index, one output at a time."""
    index = SuffixIndex()
    seconds = 0.0
    for number, output in enumerate(_outputs(text)):
        context = text[max(0, number * _OUTPUT - 64) : number * _OUTPUT]
        start = time.perf_counter()
        index.append(number, output, context)
        seconds += time.perf_counter() - start
    return seconds / len(text), index.memory_bytes() / len(text)


def record_cost(cache: SuffixCache, text: Tokens) -> float:
    """Seconds per token of requests that each write one output in steps of a few tokens."""
    start = time.perf_counter()
    for output in _outputs(text):
        with cache.request(EMPTY) as request:
            for at in range(0, len(output), _STEP):
                request.extend(output[at : at + _STEP])
    return (time.perf_counter() - start) / len(text)


def request_start_cost() -> float:
    """Median seconds per prompt token of a request whose int32 prompt extends the session's last prompt."""
    text = synthetic_tokens(_PROMPT + 50 * _TURN, seed=1)
    seconds = []
    with SuffixCache.open(memory_bytes=_MEMORY) as cache:
        for end in range(_PROMPT, len(text) + 1, _TURN):
            prompt = text[:end]
            start = time.perf_counter()
            request = cache.request(prompt, session="long")
            seconds.append((time.perf_counter() - start) / end)
            request.abandon()
    return median(seconds[1:])  # the first request has no session to extend


def draft_latency(cache: SuffixCache) -> Latency:
    """Latency of drafts for a request that continues the cached text."""
    cached = cache.stats().tokens
    text = _continuation(cached, 2000 + _STEP * (_MEASURED + _WARMUP))
    with cache.request(text[:2000], store=False) as request:
        return _drafts(cached, text[2000:], request.draft, request.extend)


def open_cost(folder: Path, tokens: int) -> Opening:
    """The cost of opening a cache of `tokens` tokens that was closed before; the page cache still holds its files."""
    text = synthetic_tokens(tokens)
    with SuffixCache.open(folder, memory_bytes=_MEMORY) as cache:
        for number, output in enumerate(_outputs(text)):
            with cache.request(text[max(0, number * _OUTPUT - 64) : number * _OUTPUT]) as request:
                request.extend(output)
        cache.compact()
    gc.collect()
    start = time.perf_counter()
    with SuffixCache.open(folder, memory_bytes=_MEMORY) as cache, cache.request(text[:64], store=False) as request:
        request.draft(TREE)
        seconds = time.perf_counter() - start
        disk_bytes = cache.stats().disk_bytes
    segments = sum(file.stat().st_size for file in folder.glob("*.segment"))
    return Opening(seconds, (disk_bytes - segments) / tokens, segments / tokens)


def _outputs(text: Tokens) -> Iterator[Tokens]:
    return (text[at : at + _OUTPUT] for at in range(0, len(text), _OUTPUT))


def _continuation(cached: int, count: int) -> Tokens:
    """New text that repeats spans of the cached text, as the cached text repeats its own."""
    rng = np.random.default_rng(2)
    known = synthetic_tokens(cached)
    text = synthetic_tokens(count, seed=3)
    for at in range(0, count, 100):
        begin = int(rng.integers(0, max(1, len(known) - 80)))
        text[at : at + 80] = known[begin : begin + len(text[at : at + 80])]
    return text


def _drafts(cached: int, text: Tokens, draft: Callable[[int], Draft], extend: Callable[[Tokens], None]) -> Latency:
    seconds, sizes = [], []
    gc.collect()
    for at in range(0, len(text), _STEP):
        start = time.perf_counter()
        tree = draft(TREE)
        seconds.append(time.perf_counter() - start)
        sizes.append(len(tree))
        extend(text[at : at + _STEP])
    return Latency.of(cached, seconds[_WARMUP:], sizes[_WARMUP:])
