from __future__ import annotations

import numpy as np
import pytest

from agentspec.benchmarks.cache.costs import VOCABULARY, synthetic_tokens


@pytest.mark.parametrize("count", [0, 1, 50, 5000])
def test_as_many_valid_tokens_as_asked_for(count: int) -> None:
    text = synthetic_tokens(count)
    assert len(text) == count and text.dtype == np.int32
    assert not count or 0 <= text.min() <= text.max() < VOCABULARY


def test_the_same_seed_gives_the_same_text() -> None:
    assert np.array_equal(synthetic_tokens(2000, seed=4), synthetic_tokens(2000, seed=4))
    assert not np.array_equal(synthetic_tokens(2000, seed=4), synthetic_tokens(2000, seed=5))


def test_most_of_it_was_seen_before() -> None:
    text = synthetic_tokens(20_000).tolist()
    seen, again = set[tuple[int, ...]](), 0
    for at in range(len(text) - 4):
        gram = tuple(text[at : at + 4])
        again += gram in seen
        seen.add(gram)
    assert 0.6 < again / len(text) < 0.95
