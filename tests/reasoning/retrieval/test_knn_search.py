"""Exact search over datastores made to be hard: ties, copies, fewer entries than asked for, one query or many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.torch.stepwise import VectorScan
from agentspec.reasoning.retrieval import knn_lm
from agentspec.reasoning.retrieval.datastore import Datastore, DatastoreManifest
from agentspec.reasoning.retrieval.knn_lm import (
    PREFETCH,
    DatastoreSearch,
    KnnStride,
    Mixture,
    NeighbourCache,
    Neighbours,
)
from agentspec.speculation.stride import MOST, expected

CPU = torch.device("cpu")


def store_of(keys: Any) -> Datastore:
    keys = np.asarray(keys, np.float16)
    return Datastore(
        DatastoreManifest("m", "f", "c", keys.shape[1], 1, len(keys), True),
        keys,
        np.arange(len(keys), dtype=np.int32) % 7,
    )


def datastore_of(keys: Any) -> DatastoreSearch:
    store = store_of(keys)
    return DatastoreSearch(store, VectorScan(store.keys, CPU))


def oracle(keys: Any, query: Any, count: int) -> list[int]:
    """By distance in exact arithmetic of Python's, then entry."""
    from fractions import Fraction

    def distance(key: Any) -> Fraction:
        return sum(
            ((Fraction(float(a)) - Fraction(float(b))) ** 2 for a, b in zip(key, query, strict=True)), Fraction()
        )

    return sorted(range(len(keys)), key=lambda entry: (distance(keys[entry]), entry))[:count]


@st.composite
def hard_keys(draw: st.DrawFn) -> Any:
    """A few different vectors, many copies, on a coarse grid so that different ones are equally far too."""
    width = draw(st.integers(1, 9))
    scale = draw(st.sampled_from([0.25, 1.0, 60.0]))
    grid = st.lists(st.integers(-3, 3), min_size=width, max_size=width)
    kinds = draw(st.lists(grid, min_size=1, max_size=6))
    picks = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=40))
    return np.array([kinds[pick] for pick in picks], np.float16) * np.float16(scale)


@given(keys=hard_keys(), data=st.data())
def test_ties_go_to_the_smaller_entry(keys: Any, data: st.DataObject) -> None:
    queries = np.array(
        [data.draw(st.lists(st.integers(-3, 3), min_size=keys.shape[1], max_size=keys.shape[1])) for _ in range(3)],
        np.float32,
    )
    count = data.draw(st.integers(1, 60))
    for query, found in zip(queries, datastore_of(keys).search(queries, count), strict=True):
        assert found.entries.tolist() == oracle(keys, query, count)
        assert len(found.entries) == min(count, len(keys))
        assert found.tokens.tolist() == [entry % 7 for entry in found.entries]


@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_a_batch_finds_what_single_queries_find(offset: float) -> None:
    dice = np.random.default_rng(1)
    keys = (dice.standard_normal((20_000, 48)) + offset).astype(np.float16)
    keys[5_000:6_000] = keys[:1_000]
    datastore = datastore_of(keys)
    near = keys[dice.integers(len(keys), size=16)].astype(np.float32)
    queries = (near + dice.standard_normal(near.shape) * 0.01).astype(np.float32)
    together = datastore.search(queries, 12)
    for query, found in zip(queries, together, strict=True):
        (single,) = datastore.search(query[None], 12)
        assert single.entries.tolist() == found.entries.tolist()
        assert single.distances.tobytes() == found.distances.tobytes()
        distances = np.square(keys.astype(np.float64) - query).sum(1)
        assert found.entries.tolist() == np.argsort(distances, kind="stable")[:12].tolist()


def test_the_cache_holds_what_was_found_and_what_follows() -> None:
    store = store_of(np.arange(40)[:, None])
    cache = NeighbourCache(store)
    cache.add([Neighbours(np.array([10, 39]), np.zeros(2), store.values[[10, 39]])])
    assert len(cache) == PREFETCH + 2  # 10, those behind it and the last one
    found = cache.search(np.array([11.2], np.float32), 3)
    assert found.entries.tolist() == [11, 12, 10]
    assert np.allclose(found.distances, [0.04, 0.64, 1.44], atol=1e-5)


def test_the_cache_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knn_lm, "PREFETCH", 0)
    monkeypatch.setattr(knn_lm, "CACHED", 10)
    store = store_of(np.arange(100)[:, None])
    cache = NeighbourCache(store)
    for first in range(0, 100, 5):
        cache.add([Neighbours(np.arange(first, first + 5), np.zeros(5), store.values[first : first + 5])])
    assert len(cache) == 10
    assert sorted(cache.search(np.array([50.0], np.float32), 10).entries.tolist()) == list(range(90, 100))


@given(data=st.data())
def test_what_is_decided_stands_whatever_the_neighbours_say(data: st.DataObject) -> None:
    logits = np.array(data.draw(st.lists(st.floats(-20, 20, width=32), min_size=7, max_size=7)), np.float32)
    mixture = Mixture(data.draw(st.floats(0.01, 0.99)), data.draw(st.floats(0.1, 50)))
    tokens = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=9))
    distances = np.sort(np.array([data.draw(st.floats(0, 1e4)) for _ in tokens]))
    found = Neighbours(np.arange(len(tokens)), distances, np.array(tokens, np.int32))
    prior = mixture.prior(logits)
    scores = mixture.scores(prior, found)
    assert np.exp(scores.astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)
    decided = mixture.decided(prior)
    if decided is not None:
        assert decided == int(scores.argmax())


@pytest.mark.parametrize(("guess", "search", "gamma"), [(1, 1, 0.5), (1, 5, 0.8), (2, 1, 0.9)])
def test_the_stride_is_the_best_of_all_and_begins_with_one(guess: float, search: float, gamma: float) -> None:
    stride = KnnStride()
    stride.guessed(guess)
    assert stride.choose() == 1
    stride.searched(search)
    for _ in range(8):
        stride.verified(round(10 * gamma / (1 - gamma)), wrong=True)
    rates = [expected(s, stride.gamma) / (s * guess + search) for s in range(1, MOST + 1)]
    assert rates[stride.choose() - 1] == max(rates)
