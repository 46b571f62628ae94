from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.cache import SuffixCache
from agentspec.cache._native import IndexView
from agentspec.cache.tokens import Tokens
from agentspec.types import Namespace

MIB = 1 << 20


def text(seed: int, length: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 5000, length).astype(np.int32)


def record(cache: SuffixCache, output: Tokens, namespace: Namespace, session: str | None = None) -> None:
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
            record(cache, text(number, 60), quiet, session=f"s{number}")
        before = hit_rate(cache, quiet, 40)
        assert before > 0.9
        for number in range(200):
            record(cache, text(1000 + number, 2000), Namespace("flood", f"model-{number % 6}"))
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
            record(cache, text(seed, length), Namespace(f"t{tenant}", f"m{model}"), session=f"s{seed % 5}")
            taken = cache.tenant_bytes()
            assert all(size <= share for size in taken.values()), taken
            assert sum(taken.values()) <= limit
            for _ in range(1000):  # what was evicted is given back by a merge, which may be going on
                if (total := cache.stats().memory_bytes) <= limit:
                    break
                time.sleep(0.01)
            assert total <= limit
        cache.check_integrity()


def test_what_an_emptied_namespace_learned_is_kept() -> None:
    with SuffixCache.open(memory_bytes=MIB) as cache:
        first = Namespace("t", "m")
        for number in range(5):
            record(cache, text(number, 100), first)
        learned = cache.request([1], namespace=first).drafter.state()
        for number in range(8):
            record(cache, text(number, 2000), Namespace("t", f"other-{number}"))
        np.testing.assert_array_equal(cache.request([1], namespace=first).drafter.state(), learned)


def test_merges_that_a_draft_holds_up_are_tried_again_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    with SuffixCache.open() as cache:
        table, rests = cache._pool.namespaces, list[float]()
        monkeypatch.setattr(table, "on_pressure", lambda: None)  # only this thread looks after it
        monkeypatch.setattr("agentspec.cache.namespaces.time", SimpleNamespace(sleep=rests.append))
        for number in range(80):
            record(cache, text(number, 1500), Namespace("one"))
        [partition] = table.partitions()
        table.relieve()
        assert not rests
        with partition.lock:
            partition.forget(partition.shared.oldest(120_000).tolist()[::4])
            table.book(partition)
        draft = IndexView(partition.shared.native)
        for _ in range(3):
            table.relieve()
        assert len(rests) == 3 and partition.shared.merging_due
        del draft
        table.relieve()
        assert len(rests) == 3 and not partition.shared.merging_due
