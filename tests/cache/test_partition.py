from __future__ import annotations

import numpy as np
import pytest

from agentspec.cache.index import SuffixIndex
from agentspec.cache.partition import Partition
from agentspec.cache.record import SequenceRecord
from agentspec.cache.tokens import EMPTY
from agentspec.errors import InvalidRequestError
from agentspec.types import Labels, Namespace, Source


def partition_with(count: int) -> Partition:
    partition = Partition(Namespace("t"))
    for sequence in range(count):
        tokens = 1000 * sequence + np.arange(500, dtype=np.int32)
        partition.add(SequenceRecord(sequence, Namespace("t"), Labels(), tokens, EMPTY, 0.0))
    return partition


def test_the_least_recently_hit_sequences_go_first() -> None:
    partition = partition_with(40)
    for sequence in range(20):
        start = np.array([1000 * sequence], dtype=np.int32)
        partition.drafter.observe([(partition.shared, Source.SHARED)], start, start + 1)
    partition.merge(lambda: False)
    before = partition.shared.memory_bytes()
    partition.evict(before * 11 // 20)
    assert partition.memory_bytes() - partition.reclaimable_bytes() < before * 0.7  # before it is given back, too
    partition.merge(lambda: False)
    left = set(partition.shared.usage().sequences.tolist())
    assert set(range(20)) >= left or left >= set(range(20))
    assert 0 < len(left) <= 20
    assert partition.shared.memory_bytes() <= before * 0.6
    partition.shared.check_integrity()


def test_eviction_ends_with_nothing() -> None:
    partition = partition_with(3)
    while partition.evict(1 << 30):
        pass
    assert (partition.shared.sequence_count, len(partition.sessions)) == (0, 0)


def test_what_was_learned_is_taken_over_and_damage_ignored() -> None:
    partition = partition_with(2)
    ask = np.array([1005], dtype=np.int32)
    partition.drafter.observe([(partition.shared, Source.SHARED)], ask, ask + 7)
    copy = Partition(Namespace("t"))
    fresh = copy.drafter.state()
    for broken in (b"", b"junk", partition.learned()[:40]):
        copy.restore(broken)
        np.testing.assert_array_equal(copy.drafter.state(), fresh)
    copy.restore(partition.learned())
    np.testing.assert_array_equal(copy.drafter.state(), partition.drafter.state())


def test_what_a_drafter_learns_is_its_own_and_takes_memory_only_then() -> None:
    first, second = partition_with(2), partition_with(2)
    empty = first.drafter.memory_bytes()
    assert empty < 1024
    untouched, version = second.drafter.state(), second.drafter.version
    ask = np.array([1005], dtype=np.int32)
    first.drafter.observe([(first.shared, Source.SHARED)], ask, ask + 7)
    assert first.drafter.version > version
    assert empty < first.drafter.memory_bytes() < empty + (16 << 10)
    assert not np.array_equal(first.drafter.state(), untouched)
    assert (second.drafter.version, second.drafter.memory_bytes()) == (version, empty)
    np.testing.assert_array_equal(second.drafter.state(), untouched)
    np.testing.assert_array_equal(partition_with(0).drafter.state(), untouched)
    second.drafter.restore(untouched)
    assert second.drafter.memory_bytes() == empty  # what equals the beginning is shared again


def test_outputs_find_room_where_positions_run_out() -> None:
    """An index hands out 2^32 positions, here fewer: the oldest outputs make room, and no output is refused."""
    partition = Partition(Namespace("t"))
    partition.shared = SuffixIndex(deferred=True, capacity=20_000)
    for sequence in range(200):
        tokens = (1000 * sequence + np.arange(500)).astype(np.int32)
        partition.add(SequenceRecord(sequence, Namespace("t"), Labels(), tokens, tokens[:5], 0.0))
        assert partition.shared.count(tokens[:64]) == 1
    kept = sorted(partition.shared.usage().sequences.tolist())
    assert kept == list(range(200 - len(kept), 200)) and len(kept) >= 20
    assert [number for number in range(200) if partition.holds(number)] == kept
    partition.shared.check_integrity()
    with pytest.raises(InvalidRequestError, match="full: 20000 positions"):  # more than it can ever hold
        partition.add(SequenceRecord(200, Namespace("t"), Labels(), np.zeros(20_000, np.int32), EMPTY, 0.0))
