"""Namespaces neither wait for each other nor cost each other anything, however many there are. Counted, not timed."""

from __future__ import annotations

import sys
import threading
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.cache import SuffixCache
from agentspec.cache.index import IndexDrafter, SuffixIndex
from agentspec.cache.tokens import Tokens
from agentspec.types import Namespace
from tests.instructions import counted_instructions

MIB = 1 << 20


NATIVE = {
    SuffixIndex: ("append", "remove", "truncate", "oldest", "merge_step", "common_prefix"),
    IndexDrafter: ("observe", "keep_ends"),
}


def text(seed: int, length: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 5000, length).astype(np.int32)


def record(cache: SuffixCache, output: Tokens, namespace: str | Namespace, session: str | None = None) -> None:
    with cache.request([1, 2], namespace=namespace, session=session) as request:
        request.draft(8)
        request.extend(output[: len(output) // 2])
        request.extend(output[len(output) // 2 :])


class Watch:
    """Makes locks, and knows who waited for which, and who did native work while they held one."""

    def __init__(self) -> None:
        self.taken: dict[str, set[str]] = defaultdict(set)  # locks that a thread may have waited for
        self.worked: dict[str, set[str]] = defaultdict(set)  # threads that did native work under a lock
        self.held: dict[str, list[str]] = defaultdict(list)  # by thread
        self.made = 0

    def made_by(self, make: Callable[[], Any]) -> Callable[[], Any]:
        """Makes a lock; one that the cache makes is watched."""
        return lambda: WatchedLock(self, make()) if _is_ours(sys._getframe(1)) else make()

    def native(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            me = threading.current_thread().name
            for lock in self.held[me]:
                self.worked[lock].add(me)
            return call(*args, **options)

        return watched


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals["__name__"]).startswith("agentspec.cache.")


class WatchedLock:
    def __init__(self, watch: Watch, lock: Any) -> None:
        self.watch, self.lock = watch, lock
        watch.made += 1
        self.name = f"{sys._getframe(2).f_code.co_qualname} {watch.made}"

    def acquire(self, blocking: bool = True) -> bool:
        me = threading.current_thread().name
        if blocking:
            self.watch.taken[me].add(self.name)
        got = bool(self.lock.acquire(blocking=blocking))
        if got:
            self.watch.held[me].append(self.name)
        return got

    def release(self) -> None:
        self.watch.held[threading.current_thread().name].remove(self.name)
        self.lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watch = Watch()
    for kind in ("Lock", "RLock"):  # what waits for what is seen in no other way
        monkeypatch.setattr(threading, kind, watch.made_by(getattr(threading, kind)))
    for owner, names in NATIVE.items():
        for name in names:
            monkeypatch.setattr(owner, name, watch.native(getattr(owner, name)))
    yield watch


def together(**works: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), name=name) for name, work in works.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.parametrize("share", [None, MIB // 2])
def test_nobody_waits_for_another_tenants_work(watch: Watch, share: int | None) -> None:
    """One floods its budget, so that it evicts and merges, while another goes on."""
    quiet_done = threading.Event()

    def flood() -> None:
        turn = 0
        while not quiet_done.is_set() or turn < 60:
            record(cache, text(turn, 1500), Namespace("flood", f"m{turn % 3}"), session=f"s{turn % 9}")
            turn += 1

    def quiet() -> None:
        for turn in range(60):
            record(cache, text(10_000 + turn, 100), "quiet", session=f"s{turn % 9}")
        quiet_done.set()

    with SuffixCache.open(memory_bytes=MIB, tenant_memory_bytes=share) as cache:
        together(flood=flood, quiet=quiet)
        stats = cache.stats()
        assert stats.evicted > 10
        assert cache.tenant_bytes()["quiet"] > 50_000
        cache.check_integrity()
    waited = {lock: watch.worked.get(lock, set()) for lock in watch.taken["quiet"]}
    assert {lock: workers for lock, workers in waited.items() if workers - {"quiet"}} == {}
    everyones = watch.taken["flood"] & watch.taken["quiet"]
    assert everyones and not any(watch.worked.get(lock) for lock in everyones)
    assert any(waited.values())  # the watch sees what is done


def test_a_request_costs_the_same_beside_many_tenants() -> None:
    """Counted in instructions of the interpreter, at a full budget: every request evicts."""
    costs = {}
    for tenants in (2, 1000):
        with SuffixCache.open(tenant_memory_bytes=MIB) as cache:
            for number in range(tenants - 1):
                cache.request([1, 2], namespace=f"tenant-{number}", session="s").close()
            for turn in range(60):
                record(cache, text(turn, 2000), "one", session=f"s{turn % 3}")
            assert cache.stats().evicted > 0
            assert cache.stats().namespaces == tenants
            costs[tenants] = min(
                instructions(lambda: record(cache, text(7, 20), "one", session="s1")) for _ in range(5)
            )
            quiet = [instructions(lambda: record(cache, text(7, 20), "tenant-0", session="s")) for _ in range(5)]
            costs[-tenants] = min(quiet)
    assert costs[1000] <= 1.1 * costs[2]
    assert costs[-1000] <= 1.1 * costs[-2]


def instructions(work: Callable[[], None]) -> int:
    with counted_instructions() as count:
        work()
    return count()


def test_an_empty_namespace_takes_little() -> None:
    count = 1000
    names = [Namespace(f"tenant-{number}") for number in range(count)]
    with SuffixCache.open(memory_bytes=1 << 30) as cache:
        cache.request([1], namespace="first", store=False).close()
        tracemalloc.start()
        try:
            before, counted = tracemalloc.get_traced_memory()[0], cache.stats().memory_bytes
            for name in names:
                cache.request([1], namespace=name, store=False).close()
            traced = (tracemalloc.get_traced_memory()[0] - before) / count
        finally:
            tracemalloc.stop()
        assert (cache.stats().memory_bytes - counted) / count <= 7680 and traced <= 7680


def add(cache: SuffixCache, output: Tokens, namespace: Namespace, session: str | None = None) -> None:
    with cache.request([1, 2], namespace=namespace, session=session) as request:
        request.extend(output)


def hit_rate(cache: SuffixCache, tenant: Namespace, count: int) -> float:
    """The share of tokens of outputs 0 to `count` that are drafted rightly, a token at a time."""
    hits = total = 0
    for number in range(count):
        output = text(number, 60)
        with cache.request([1, *output[:3]], namespace=tenant, store=False) as request:
            for token in output[3:]:
                hits += request.draft(max_tokens=1).tokens.tolist() == [token]
                total += 1
                request.extend([token])
    return hits / total


@pytest.mark.parametrize("share", [pytest.param(None, marks=pytest.mark.slow), 2 * MIB])
def test_a_flood_leaves_another_tenants_hit_rate_as_it_was(share: int | None) -> None:
    """The flood comes under many models at once, none of which is large by itself."""
    quiet = Namespace("quiet", "m")
    with SuffixCache.open(memory_bytes=4 * MIB, tenant_memory_bytes=share) as cache:
        for number in range(40):
            add(cache, text(number, 60), quiet, session=f"s{number}")
        before = hit_rate(cache, quiet, 40)
        assert before > 0.9
        for number in range(200):
            add(cache, text(1000 + number, 2000), Namespace("flood", f"model-{number % 6}"))
        assert cache.stats().evicted > 0
        assert cache.tenant_bytes()["flood"] <= (share or 4 * MIB)
        assert abs(hit_rate(cache, quiet, 40) - before) < 0.01


@given(
    turns=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(1, 6000)), max_size=60),
)
def test_every_share_is_kept_whatever_comes(turns: list[tuple[int, int, int]]) -> None:
    limit, share = 3 * MIB, MIB
    with SuffixCache.open(memory_bytes=limit, tenant_memory_bytes=share) as cache:
        for seed, (tenant, model, length) in enumerate(turns):
            add(cache, text(seed, length), Namespace(f"t{tenant}", f"m{model}"), session=f"s{seed % 5}")
            taken = cache.tenant_bytes()
            assert all(size <= share for size in taken.values()), taken
            assert sum(taken.values()) <= limit
            for _ in range(1000):  # what was evicted is given back by a merge, which may be going on
                if (total := cache.stats().memory_bytes) <= limit:
                    break
                time.sleep(0.01)
            assert total <= limit
        cache.check_integrity()
