"""What one tenant stores must not show at another's: not in drafts, not in how many, not in how long they take."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

import numpy as np
import pytest

from agentspec.cache import SuffixCache
from agentspec.cache.tokens import Tokens

CANARIES = 1000
LENGTH = 40
SEEN = 12  # leading tokens of a canary that the other tenant prompts with
SMALL_EFFECT = 0.05  # a share of the median time
KS_LIMIT = 2.69  # two-sample Kolmogorov-Smirnov, p = 1e-6: sqrt(-ln(p / 2) / 2)


def canary(number: int) -> Tokens:
    return np.arange(LENGTH, dtype=np.int32) + 1_000_000 + LENGTH * number


def fill(cache: SuffixCache, tenant: str, outputs: Iterator[Tokens]) -> None:
    for output in outputs:
        with cache.request([1, 2, 3], namespace=tenant) as request:
            request.extend(output)


def own_texts() -> Iterator[Tokens]:
    rng = np.random.default_rng(4)
    return (rng.integers(0, 300, 60).astype(np.int32) for _ in range(200))


def filled(canaries: range) -> SuffixCache:
    """Tenant b's texts beside those canaries of tenant a."""
    cache = SuffixCache.open()
    fill(cache, "a", map(canary, canaries))
    fill(cache, "b", own_texts())
    return cache


def drafted(cache: SuffixCache, prompt: Tokens) -> tuple[list[int], float]:
    """What tenant b is offered after `prompt`, and the seconds that took."""
    request = cache.request(prompt, namespace="b", session="probe", store=False)
    try:
        start = perf_counter()
        draft = request.draft(max_tokens=32)
        return draft.tokens.tolist(), perf_counter() - start
    finally:
        request.abandon()


def distance(one: list[float], other: list[float]) -> float:
    """The largest gap between two samples' distribution functions."""
    at = np.sort(np.concatenate((one, other)))
    shares = [np.searchsorted(np.sort(sample), at, side="right") / len(sample) for sample in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


def test_canaries_are_never_drafted_for_another_tenant() -> None:
    shared, alone, mixed = filled(range(CANARIES)), filled(range(0)), next(own_texts())[:30]
    for number in range(CANARIES):
        for prompt in (canary(number)[:SEEN], np.concatenate((mixed, canary(number)[:SEEN])), mixed[: 1 + number % 30]):
            seen, _ = drafted(shared, prompt)
            assert not set(seen) & set(canary(number).tolist())
            assert seen == drafted(alone, prompt)[0]


@pytest.mark.long
def test_how_long_drafting_takes_tells_nothing_of_what_another_tenant_stored() -> None:
    """As many texts of tenant a both times, so that memory is used alike: once what b asks for, once anything else.
    Times differ when that is beyond chance and more than a few percent of a draft's."""
    caches = filled(range(CANARIES)), filled(range(CANARIES, 2 * CANARIES))
    took: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * CANARIES):
        prompt = canary(number % CANARIES)[:SEEN]
        first = number % 2  # neither always goes first
        for side in (first, 1 - first):
            took[side].append(drafted(caches[side], prompt)[1])
    one, other = map(np.median, took)
    alike = abs(one - other) <= SMALL_EFFECT * max(one, other)
    assert alike or distance(*took) <= KS_LIMIT * np.sqrt(2 / len(took[0]))


def test_the_distance_tells_different_times_apart() -> None:
    rng = np.random.default_rng(1)
    slow, fast, also_fast = (rng.exponential(mean, 2000).tolist() for mean in (1.3, 1.0, 1.0))
    assert distance(fast, also_fast) < KS_LIMIT * np.sqrt(2 / 2000) < distance(slow, fast)
