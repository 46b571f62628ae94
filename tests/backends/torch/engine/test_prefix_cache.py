"""Slots of earlier calls: the longest prefix of one tenant, within bytes, the oldest out first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.torch.engine.prefix_cache import SHORTEST, PrefixCache
from agentspec.backends.torch.model.kv_cache import SequenceCache
from agentspec.cache.deletion import Reach, select
from agentspec.types import Namespace, SamplingParams


def slots_of(tokens: Sequence[int]) -> SequenceCache:
    """A cache of one layer whose keys and values are the token ids themselves."""
    cache = SequenceCache(len(tokens))
    values = torch.tensor(tokens, dtype=torch.float32).view(1, 1, -1, 1)
    cache.update(values, values, 0)
    cache.commit(len(tokens), ())
    return cache


def content(cache: SequenceCache) -> list[int]:
    keys, _ = cache.update(torch.empty(1, 1, 0, 1), torch.empty(1, 1, 0, 1), 0)
    return [int(v) for v in keys.flatten().tolist()]


BYTES = 8  # of one row: a key and a value in float32
TEXT = st.lists(st.integers(0, 1), min_size=6, max_size=24)


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


def test_a_common_prefix_is_stored_once() -> None:
    """Ten conversations over one system prompt: its slots are there once, and each is found whole."""
    system = [5] * 100
    store = PrefixCache()
    texts = [[*system, *range(n, n + 20)] for n in range(0, 200, 20)]
    for tokens in texts:
        store.keep("t", tokens, slots_of(tokens))
    assert store.nbytes == (100 + 10 * 20) * BYTES
    for tokens in texts:
        assert content(store.find("t", tokens, 1)) == tokens
    store.keep("other", texts[0], slots_of(texts[0]))
    assert store.nbytes == (100 + 10 * 20 + 120) * BYTES  # nothing is shared between tenants


@given(st.lists(st.tuples(st.sampled_from("ab"), TEXT), max_size=12), TEXT, st.integers(0, 800))
def test_found_slots_are_right_under_memory_pressure(
    kept: list[tuple[str, list[int]]], wanted: list[int], left: int
) -> None:
    store = PrefixCache()
    for number, (tenant, tokens) in enumerate(kept):
        store.keep(tenant, tokens, slots_of(tokens), left, copy=bool(number % 2))
        assert store.nbytes <= left
        found = store.find("a", wanted, 30, left // (1 + number % 3))
        assert found is None or (content(found) == wanted[: found.length] and found.length >= SHORTEST)
        assert store.nbytes <= left // (1 + number % 3)
        nodes = list(store._nodes())
        assert store.nbytes == sum(len(node.tokens) for node in nodes) * BYTES
        assert all(node.rows.nbytes == len(node.tokens) * BYTES for node in nodes)


def test_writing_to_found_slots_leaves_the_stored_ones() -> None:
    store = PrefixCache()
    tokens = list(range(10))
    store.keep("t", tokens, slots_of(tokens))
    first = store.find("t", tokens, 20)
    first.update(torch.full((1, 1, 2, 1), 99.0), torch.full((1, 1, 2, 1), 99.0), 0)
    first.truncate(3)
    assert content(store.find("t", tokens, 20)) == tokens


TEXTS = st.tuples(st.sampled_from("ab"), st.sampled_from([None, "s", "t"]), st.lists(st.integers(0, 1), max_size=24))


def reach(**conditions: Any) -> Reach:
    return Reach(select(**conditions).scope, lambda tenant: Namespace(tenant, "model", "tokenizer", "template"))


@given(st.lists(TEXTS, max_size=10), TEXTS, st.sampled_from(["s", "t", None]))
def test_the_longest_prefix_of_the_tenant_is_found_without_deleted_text(
    stored: list[Any], wanted: Any, deleted: str | None
) -> None:
    """Of one tenant all is deleted, or one session, with all text that goes on behind it."""
    store, tenant = PrefixCache(), wanted[0]
    for owner, session, tokens in stored:
        store.keep(owner, tokens, slots_of(tokens), session=session)
    for gone in (False, True):
        for owner, _, tokens in [*stored, wanted]:
            left = [
                other
                for who, session, other in stored
                if who == owner and len(other) >= SHORTEST
                and not (gone and who == tenant and deleted in (None, session))
            ]  # fmt: skip
            best = max((shared(other, tokens) for other in left), default=0)
            found = store.find(owner, tokens, 100)
            assert found is None or content(found) == tokens[: found.length]
            assert (found.length if found else 0) <= best
            if best >= SHORTEST and not (gone and owner == tenant):
                assert found is not None and found.length == best and found.capacity == 100
        store.forget(reach(tenant=tenant) if deleted is None else reach(tenant=tenant, session=deleted))
    assert store.nbytes == sum(node.rows.nbytes for node in store._nodes())


def test_a_deletion_by_age_also_drops_guesses() -> None:
    store, texts = PrefixCache(), [[value] * 20 for value in range(3)]
    for text in texts:
        store.keep("a", text, slots_of(text), guessed=text[0] == 2)
    (old,) = (node for node in store._nodes() if len(node.tokens) and node.tokens[0] == 0)
    old.made = time.time() - 100
    store.forget(reach(older_than=50))
    assert [store.find("a", text, 20) is not None for text in texts] == [False, True, False]
    store.forget(reach(session="another"))
    assert store.find("a", texts[1], 20) is not None


def test_a_deletion_while_slots_are_stored_leaves_no_lost_slots() -> None:
    class Slots(SequenceCache):
        @property
        def slot_bytes(self) -> int:
            store.forget(reach(tenant="a"))
            return super().slot_bytes

    store, first = PrefixCache(), list(range(20))
    store.keep("a", first, slots_of(first))
    second = slots_of([*first, *range(50, 70)])
    second.__class__ = Slots
    store.keep("a", [*first, *range(50, 70)], second, 1 << 20)
    assert store.nbytes == sum(node.rows.nbytes for node in store._nodes())
    store.shrink(None)
    assert store.nbytes == 0 and not store._roots


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
