"""Slots of earlier calls: the longest prefix of one tenant, within bytes, the oldest out first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.torch.engine.prefix_cache import SHORTEST, PrefixCache, PrefixNode
from agentspec.backends.torch.model.kv_cache import SequenceCache
from agentspec.types import SamplingParams
from tests.backends.torch.engine.conftest import slots_of


def content(cache: SequenceCache) -> list[int]:
    keys, _ = cache.update(torch.empty(1, 1, 0, 1), torch.empty(1, 1, 0, 1), 0)
    return [int(v) for v in keys.flatten().tolist()]


BYTES = 8  # of one row: a key and a value in float32
TEXT = st.lists(st.integers(0, 1), min_size=6, max_size=24)


@given(st.lists(st.tuples(st.sampled_from("ab"), TEXT), max_size=8), TEXT)
def test_finds_the_longest_prefix_of_the_tenant(kept: list[tuple[str, list[int]]], wanted: list[int]) -> None:
    store = PrefixCache()
    for tenant, tokens in kept:
        store.keep(tenant, tokens, slots_of(tokens))
    best = max(
        (shared(tokens, wanted) for tenant, tokens in kept if tenant == "a" and len(tokens) >= SHORTEST), default=0
    )
    found = store.find("a", wanted, 100)
    if best < SHORTEST:
        assert found is None
    else:
        assert content(found) == wanted[:best] and found.capacity == 100


def shared(left: list[int], right: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def test_the_least_recently_used_goes_first() -> None:
    store, limit = PrefixCache(), 2 * 10 * BYTES
    one, two, three = ([value] * 10 for value in (1, 2, 3))
    store.keep("t", one, slots_of(one), limit)
    store.keep("t", two, slots_of(two), limit)
    assert store.find("t", one, 10)
    store.keep("t", three, slots_of(three), limit)
    assert store.find("t", one, 10) and store.find("t", three, 10)
    assert store.find("t", two, 10) is None


def test_a_common_beginning_is_kept_once() -> None:
    """Ten conversations over one system prompt: its slots are there once, and each is found whole."""
    system = [5] * 100
    store = PrefixCache()
    texts = [[*system, *range(n, n + 20)] for n in range(0, 200, 20)]
    for tokens in texts:
        store.keep("t", tokens, slots_of(tokens))
    assert store.nbytes == (100 + 10 * 20) * BYTES and len(store) == 10
    for tokens in texts:
        assert content(store.find("t", tokens, 1)) == tokens
    store.keep("other", texts[0], slots_of(texts[0]))
    assert store.nbytes == (100 + 10 * 20 + 120) * BYTES  # nothing is shared between tenants


@given(st.lists(st.tuples(st.sampled_from("ab"), TEXT), max_size=12), TEXT, st.integers(0, 800))
def test_whatever_is_found_under_pressure_is_right(
    kept: list[tuple[str, list[int]]], wanted: list[int], left: int
) -> None:
    store = PrefixCache()
    for number, (tenant, tokens) in enumerate(kept):
        store.keep(tenant, tokens, slots_of(tokens), left, copy=bool(number % 2))
        assert store.nbytes <= left
        found = store.find("a", wanted, 30, left // (1 + number % 3))
        assert found is None or (content(found) == wanted[: found.length] and found.length >= SHORTEST)
        assert store.nbytes <= left // (1 + number % 3)
        nodes = [node for root in store._roots.values() for node in below(root)]
        assert store.nbytes == sum(len(node.tokens) for node in nodes) * BYTES
        assert all(node.rows.nbytes == len(node.tokens) * BYTES for node in nodes)


def below(node: PrefixNode) -> list[PrefixNode]:
    return [found for child in node.children for found in (child, *below(child))]


def test_where_both_do_not_fit_the_slots_are_moved() -> None:
    store, tokens = PrefixCache(), list(range(30))
    store.keep("t", tokens, slots_of(tokens))
    store.keep("t", [7] * 20, slots_of([7] * 20))
    assert content(store.find("t", tokens, 40, left_bytes=0)) == tokens
    assert (store.nbytes, len(store)) == (0, 0)


def test_a_conversation_that_goes_on_adds_only_what_is_new() -> None:
    store, tokens = PrefixCache(), list(range(10))
    for length in range(10, 101, 10):
        tokens = list(range(length))
        store.keep("t", tokens, slots_of(tokens), 100 * BYTES)
        assert (store.nbytes, len(store)) == (length * BYTES, 1)
    store.keep("t", list(range(101)), slots_of(list(range(101))), 100 * BYTES)  # more than there may be
    assert store.find("t", tokens, 1).length == 100


def test_what_is_handed_out_can_be_written_to() -> None:
    store = PrefixCache()
    tokens = list(range(10))
    store.keep("t", tokens, slots_of(tokens))
    first = store.find("t", tokens, 20)
    first.update(torch.full((1, 1, 2, 1), 99.0), torch.full((1, 1, 2, 1), 99.0), 0)
    first.truncate(3)
    assert content(store.find("t", tokens, 20)) == tokens


@pytest.mark.parametrize("edit", ["extended", "branched", "shortened", "same"])
def test_answers_are_the_same_with_reused_rows(family: Any, edit: str) -> None:
    """A second call over a grown, edited, cut or equal history, with the first call's rows and without."""
    sampling = SamplingParams(temperature=0.8, seed=21)
    first = list(range(20, 50))
    call = family.run(first, sampling, lambda text, budget: None)
    history = call.sequence.tokens
    prompt = {
        "extended": [*history, 1, 2, 3],
        "branched": [*history[:35], 9, 9, 9],
        "shortened": history[:25],
        "same": first,
    }[edit]
    store = PrefixCache()
    store.keep("t", history[: call.sequence.kv_cache.length], call.sequence.kv_cache)
    rows = store.find("t", prompt[:-1], len(prompt))
    assert rows.length == min(shared(history, prompt), len(prompt) - 1, len(history) - 1)
    again = family.run(prompt, sampling, lambda text, budget: None, kv_cache=rows)
    assert again.usage.cached_tokens >= 24
    family.require_same(prompt, sampling, again.tokens, family.oracle(prompt, sampling))
