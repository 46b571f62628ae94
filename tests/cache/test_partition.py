from __future__ import annotations

import numpy as np

from agentspec.cache.partition import Space
from agentspec.cache.tokens import EMPTY
from agentspec.types import Namespace, Source


def space_with(count: int) -> Space:
    space = Space(Namespace("t"))
    for sequence in range(count):
        space.share(sequence, 1000 * sequence + np.arange(500, dtype=np.int32), EMPTY)
    return space


def test_the_least_recently_hit_sequences_go_first() -> None:
    space = space_with(40)
    for sequence in range(20):
        start = np.array([1000 * sequence], dtype=np.int32)
        space.drafter.observe([(space.shared, Source.SHARED)], start, start + 1)
    before = space.shared.memory_bytes()
    space.evict(before * 11 // 20)
    left = set(space.shared.usage().sequences.tolist())
    assert set(range(20)) >= left or left >= set(range(20))
    assert 0 < len(left) <= 20
    assert space.shared.memory_bytes() <= before * 0.6
    space.shared.check_integrity()


def test_eviction_ends_with_nothing() -> None:
    space = space_with(3)
    while space.evict(1 << 30):
        pass
    assert (space.shared.sequence_count, len(space.sessions)) == (0, 0)


def test_hits_are_reported_once() -> None:
    space = space_with(2)
    ask = np.array([1005], dtype=np.int32)
    for _ in range(3):
        space.drafter.observe([(space.shared, Source.SHARED)], ask, ask + 1)
    assert space.fresh_hits() == [(1, 3)]
    assert space.fresh_hits() == []
    space.drafter.observe([(space.shared, Source.SHARED)], ask, ask + 1)
    assert space.fresh_hits() == [(1, 1)]


def test_what_was_learned_is_taken_over_and_damage_ignored() -> None:
    space = space_with(2)
    ask = np.array([1005], dtype=np.int32)
    space.drafter.observe([(space.shared, Source.SHARED)], ask, ask + 7)
    copy = Space(Namespace("t"))
    fresh = copy.drafter.state()
    for broken in (b"", b"junk", space.learned()[:40]):
        copy.restore(broken)
        np.testing.assert_array_equal(copy.drafter.state(), fresh)
    copy.restore(space.learned())
    np.testing.assert_array_equal(copy.drafter.state(), space.drafter.state())
