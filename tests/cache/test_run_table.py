from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from agentspec.cache.index import SuffixIndex


@given(st.lists(st.integers(0, 5), min_size=300, max_size=1500), st.integers(0, 5), st.randoms(use_true_random=False))
def test_long_runs_are_searched_by_their_tables(tokens: list[int], common: int, random: random.Random) -> None:
    """Runs long enough for tables, with tokens common enough to be sampled; counts are exact all the same."""
    text = [common if random.random() < 0.4 else token for token in tokens]
    index, cut = SuffixIndex(tail=16, ratio=2), random.randrange(1, len(text))
    index.append(0, text)
    index.append(1, text[:cut])
    index.truncate(0, len(text) - cut // 2)
    kept = [text[: len(text) - cut // 2], text[:cut]]
    for context in ([a] for a in range(7)):
        check_successors(index, kept, context)
    for _ in range(30):
        sequence, length = random.choice(kept), random.choice((1, 2, 2, 3, 5, 9))
        end = random.randrange(len(sequence) + 1)
        check_successors(index, kept, [*sequence[max(0, end - length) : end], random.randrange(7)])
    index.check_integrity()


def check_successors(index: SuffixIndex, sequences: list[list[int]], context: list[int]) -> None:
    n = len(context)
    counts = Counter(s[i] for s in sequences for i in range(n, len(s)) if s[i - n : i] == context)
    found = index.successors(context)
    assert dict(zip(found.tokens.tolist(), found.counts.tolist(), strict=True)) == counts
    assert index.count(context) == counts.total()
