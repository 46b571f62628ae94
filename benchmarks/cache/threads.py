"""Measures how much threads gain by drafting from one cache at once, and how much two threads can gain at best."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

from agentspec.cache import CacheRequest, SuffixCache
from agentspec.cache.index import propose_batch
from agentspec.cache.tokens import Tokens

Action = Callable[[], object]

_ROUNDS = 9
_DRAFTS = 600  # of each thread
_BATCH, _BATCHES = 16, 15  # requests of a batch, and batches of a round
_BUFFER = bytes(1 << 20)  # hashed 40 times, which takes about as long


@dataclass(frozen=True, slots=True)
class Gains:
    """Throughputs relative to one thread: medians over rounds, each of which measures all three in turn."""

    two_threads: float  # each thread drafts for one request
    batch: float  # 16 requests through `propose_batch`, relative to one by one
    two_cores: float  # plain hashing: the upper limit of `two_threads`, 2 on an idle machine
    load: float  # one-minute load average, this benchmark included


def measure_gains(cache: SuffixCache, text: Tokens, tree: int) -> Gains:
    """Draft trees of up to `tree` tokens for requests that continue different places of `text`."""
    with _requests(cache, text) as requests:
        drafting = [partial(_draft, request, tree) for request in requests[:2]]
        rounds = [(_two_threads(_hash), _two_threads(*drafting), _batch(requests, tree)) for _ in range(_ROUNDS)]
    cores, threads, batch = (median(values) for values in zip(*rounds, strict=True))
    return Gains(threads, batch, cores, os.getloadavg()[0])


@contextmanager
def _requests(cache: SuffixCache, text: Tokens) -> Iterator[list[CacheRequest]]:
    ends = [len(text) - 50 * number for number in range(_BATCH)]
    requests = [cache.request(text[:end], session=str(end), store=False) for end in ends]
    try:
        yield requests
    finally:
        for request in requests:
            request.abandon()


def _draft(request: CacheRequest, tree: int) -> None:
    for _ in range(_DRAFTS):
        request.draft(tree)


def _hash() -> None:
    for _ in range(40):
        hashlib.sha256(_BUFFER).digest()


def _two_threads(*actions: Action) -> float:
    """Actions per second of two threads, relative to one thread."""
    pair = (actions[0], actions[-1])
    return sum(_together([action]) for action in pair) / _together(pair)


def _batch(requests: Sequence[CacheRequest], tree: int) -> float:
    start = time.perf_counter()
    for _ in range(_BATCHES):
        for request in requests:
            request.draft(tree)
    middle = time.perf_counter()
    for _ in range(_BATCHES):
        propose_batch([request.job(tree) for request in requests])
    return (middle - start) / (time.perf_counter() - middle)


def _together(actions: Sequence[Action]) -> float:
    """Seconds until all actions are done, each in its own thread."""
    ready = threading.Barrier(len(actions) + 1)

    def run(action: Action) -> None:
        ready.wait()
        action()

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    ready.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start
