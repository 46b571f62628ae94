"""Costs of the cache: processor time of drafts, commits and prompts, time to open, bytes per token.

Recorded calls are what is judged: a cache is filled with the outputs of most sessions, again and again under other
token ids until it is as large as wanted, and the calls of the other sessions are then replayed in it. Synthetic text,
which is easier, stays as a control. Calls are made from Python, as users do.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agentspec.benchmarks.cache.peer import PeerCache, installed_version
from agentspec.benchmarks.report import Progress
from agentspec.cache import SuffixCache
from agentspec.cache.index import SuffixIndex
from agentspec.cache.tokens import Tokens
from agentspec.errors import ConfigurationError
from agentspec.recordings.replay import EncodedCall, Replay, replay

VOCABULARY = 49_152
CACHED = 1_000_000
TREE = 32
_OUTPUT = 500  # tokens of one synthetic output
_CALLS = 400  # replayed calls, at most
_HELD_OUT = 5  # every fifth session is replayed
_MEMORY = 8 << 30  # never reached: eviction would change what is measured
_SPAN = (8, 200)  # tokens that synthetic text copies at a time
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


@dataclass(frozen=True, slots=True)
class Workload:
    """Outputs that fill a cache, and calls that are replayed in it then."""

    outputs: Sequence[Tokens]
    calls: Sequence[EncodedCall]

    @classmethod
    def recorded(cls, calls: Sequence[EncodedCall]) -> Workload:
        """Every fifth session is replayed. Raises `ConfigurationError` where there are fewer than five."""
        sessions = list(dict.fromkeys(call.session for call in calls))
        held_out = set(sessions[_HELD_OUT - 1 :: _HELD_OUT])
        if not held_out:
            raise ConfigurationError(f"costs need recorded calls of {_HELD_OUT} sessions, not {len(sessions)}")
        outputs = [call.response for call in calls if call.session not in held_out]
        return cls(outputs, [call for call in calls if call.session in held_out][:_CALLS])

    @classmethod
    def synthetic(cls, tokens: int) -> Workload:
        """Four fifths of each measured text are copied from the text that fills the cache."""
        known, rng = synthetic_tokens(tokens), np.random.default_rng(2)
        text = synthetic_tokens(2 * _OUTPUT * min(_CALLS, 20), seed=3)
        for at in range(0, len(text), 100):
            begin = int(rng.integers(0, max(1, tokens - 80)))
            text[at : at + 80] = known[begin : begin + len(text[at : at + 80])]
        halves = list(_split(text))
        calls = [EncodedCall(f"s{at}", halves[at], halves[at + 1]) for at in range(0, len(halves), 2)]
        return cls(list(_split(known)), calls)

    def fill(self, tokens: int) -> Iterator[Tokens]:
        """Outputs of `tokens` tokens in all: as they are, and then again and again under other token ids."""
        ids = np.arange(1 + max(int(output.max()) for output in self.outputs), dtype=np.int32)
        rng, left = np.random.default_rng(0), tokens
        while True:
            for output in self.outputs:
                yield ids[output][:left]
                left -= len(output)
                if left <= 0:
                    return
            ids = rng.permutation(ids)


def _split(text: Tokens) -> Iterator[Tokens]:
    return (text[at : at + _OUTPUT] for at in range(0, len(text), _OUTPUT))


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of the calling thread's processor time, and the mean size of the drafted trees."""

    cached_tokens: int
    drafts: int
    tree: float
    median: float  # of a draft
    p99: float
    extend: float  # per output token: learning, and the session
    close: float  # per output token: cached past outputs; the peer gives back the prompt
    new_prompt: float  # per token of the first prompt of a session
    known_prompt: float  # per token of a prompt that extends the session's last one

    @property
    def commit(self) -> float:
        """Seconds per output token in all."""
        return self.extend + self.close

    @classmethod
    def of(cls, cached_tokens: int, calls: Sequence[EncodedCall], done: Replay) -> Work:
        first = {call.session: number for number, call in reversed(list(enumerate(calls)))}
        new = np.array([first[call.session] == number for number, call in enumerate(calls)])
        opening, lengths = np.array(done.open_seconds), np.array([len(call.prompt) for call in calls])
        middle, late = np.percentile(done.draft_seconds, [50, 99])
        return cls(
            cached_tokens,
            len(done.draft_seconds),
            done.drafted_per_step,
            float(middle),
            float(late),
            done.extend_seconds / sum(done.tokens),
            done.close_seconds / sum(done.tokens),
            *(float(opening[chosen].sum() / max(1, lengths[chosen].sum())) for chosen in (new, ~new)),
        )


@dataclass(frozen=True, slots=True)
class Costs:
    """Times in seconds, sizes in bytes per token."""

    recorded: Work  # over `CACHED` tokens in memory
    opened: Work  # over `opened_tokens` tokens on disk, mapped
    synthetic: Work  # a control, over `CACHED` tokens in memory
    peer: Work | None  # the peer's, in turns with `recorded`
    insert: float  # per token: adding an output to the cached past outputs, merges included
    memory_bytes: float  # of the cached past outputs
    disk_bytes: float  # in the database
    segment_bytes: float  # in a segment
    opened_tokens: int
    open_seconds: float  # from opening a cache on disk to its first draft


def measure_costs(calls: Sequence[EncodedCall], opened: int, progress: Progress, *, cached: int = CACHED) -> Costs:
    """Measure everything with `cached` tokens in memory and `opened` tokens on disk."""
    recorded = Workload.recorded(calls)
    progress(f"inserting {cached:,} tokens")
    insert, memory_bytes = _insert(recorded.fill(cached), cached)
    progress(f"drafting over {cached:,} recorded tokens")
    ours, peer = _in_turns(recorded, cached, installed_version() is not None)
    progress(f"drafting over {cached:,} synthetic tokens")
    synthetic, _ = _in_turns(Workload.synthetic(cached), cached, False)
    with tempfile.TemporaryDirectory(prefix="agentspec-bench-") as folder:
        progress(f"writing {opened:,} tokens, opening and drafting")
        work, sizes, seconds = _on_disk(Path(folder), recorded, opened)
    return Costs(ours, work, synthetic, peer, insert, memory_bytes, *sizes, opened, seconds)


def _insert(outputs: Iterable[Tokens], tokens: int) -> tuple[float, float]:
    """(seconds, bytes) per token of adding outputs to an index, one at a time."""
    index, seconds = SuffixIndex(), 0.0
    for number, output in enumerate(outputs):
        start = time.thread_time()
        index.append(number, output)
        seconds += time.thread_time() - start
    return seconds / tokens, index.memory_bytes() / tokens


def _record(cache: SuffixCache, outputs: Iterable[Tokens]) -> None:
    for output in outputs:
        with cache.request([]) as request:
            request.extend(output)


def _in_turns(load: Workload, cached: int, peered: bool) -> tuple[Work, Work | None]:
    """The work of the cache and, if `peered`, of the peer: one call of each after the other."""
    ours, theirs = Replay(), Replay()
    peer = PeerCache() if peered else None
    if peer:
        peer.fill(load.fill(cached))
    with SuffixCache.open(memory_bytes=_MEMORY) as cache:
        _record(cache, load.fill(cached))
        gc.collect()
        for call in load.calls:
            replay([call], lambda call: cache.request(call.prompt, session=call.session), TREE, ours)
            if peer:
                replay([call], peer.request, TREE, theirs)
    return Work.of(cached, load.calls, ours), Work.of(cached, load.calls, theirs) if peer else None


def _on_disk(folder: Path, load: Workload, tokens: int) -> tuple[Work, tuple[float, float], float]:
    """The work over a cache that was closed before, its bytes per token in the database and in segments, and how long
    it takes from opening it to the first draft; the page cache still holds its files.
    """
    with SuffixCache.open(folder, memory_bytes=_MEMORY) as cache:
        _record(cache, load.fill(tokens))
        cache.compact()
    gc.collect()
    start = time.perf_counter()
    with SuffixCache.open(folder, memory_bytes=_MEMORY) as cache:
        with cache.request(load.calls[0].prompt, store=False) as request:
            request.draft(TREE)
        seconds = time.perf_counter() - start
        segments = sum(file.stat().st_size for file in folder.glob("*.segment"))
        sizes = (cache.stats().disk_bytes - segments) / tokens, segments / tokens
        done = replay(load.calls, lambda call: cache.request(call.prompt, session=call.session), TREE)
    return Work.of(tokens, load.calls, done), sizes, seconds
