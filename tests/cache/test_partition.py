from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentspec.cache.partition import TRANSCRIPT, Partition, Session, Sessions
from agentspec.cache.tokens import EMPTY, SequenceRecord, Tokens
from agentspec.errors import InvalidRequestError
from agentspec.types import Namespace, Source
from tests.cache.native_index import NativeIndex

MOST = 1 << 20


def partition_with(count: int) -> Partition:
    partition = Partition(Namespace("t"))
    for sequence in range(count):
        tokens = 1000 * sequence + np.arange(500, dtype=np.int32)
        partition.add(SequenceRecord(sequence, Namespace("t"), None, tokens, EMPTY, 0.0))
    return partition


def test_the_least_recently_hit_sequences_go_first() -> None:
    partition = partition_with(40)
    for sequence in range(20):
        start = np.array([1000 * sequence], dtype=np.int32)
        partition.drafter.observe([(partition.shared, Source.SHARED)], start, start + 1)
    partition.merge(lambda: False)
    before = partition.memory_bytes()
    partition.evict(before * 11 // 20)
    assert partition.memory_bytes() - partition.reclaimable_bytes() < before * 0.7  # before it is given back, too
    partition.merge(lambda: False)
    left = set(partition.shared.oldest(1 << 40).tolist())
    assert set(range(20)) >= left or left >= set(range(20))
    assert 0 < len(left) <= 20
    assert partition.memory_bytes() <= before * 0.6
    partition.shared.check_integrity()


def test_outputs_find_room_where_positions_run_out() -> None:
    """An index hands out 2^32 positions, here fewer: the oldest outputs make room, and no output is refused."""
    partition = Partition(Namespace("t"))
    partition.shared = index = NativeIndex(deferred=True, capacity=20_000)
    for sequence in range(200):
        tokens = (1000 * sequence + np.arange(500)).astype(np.int32)
        partition.add(SequenceRecord(sequence, Namespace("t"), None, tokens, tokens[:5], 0.0))
        assert index.count(tokens[:64]) == 1
    kept = sorted(partition.shared.oldest(1 << 40).tolist())
    assert kept == list(range(200 - len(kept), 200)) and len(kept) >= 20
    assert [number for number in range(200) if partition.holds(number)] == kept
    partition.shared.check_integrity()
    with pytest.raises(InvalidRequestError, match="full: 20000 positions"):  # more than it can ever hold
        partition.add(SequenceRecord(200, Namespace("t"), None, np.zeros(20_000, np.int32), EMPTY, 0.0))


def test_shapes_are_of_the_newest_outputs_also_once_loaded() -> None:
    partition, loaded = partition_with(40), Partition(Namespace("t"))
    loaded.adopt(partition.shared, dict(partition.known()))
    for one in (partition, loaded):
        assert sorted(one.shapes.oldest(MOST).tolist()) == list(range(24, 40))  # of 500 tokens each
        one.remove([30])
        assert 30 not in one.shapes.oldest(MOST)


def tokens(*ids: int) -> Tokens:
    return np.array(ids, dtype=np.int32)


def text(seed: int, length: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 1000, length).astype(np.int32)


def test_an_edited_history_replaces_what_follows() -> None:
    session = Session("s")
    session.begin(text(0, 500), MOST)
    edited = np.concatenate((text(0, 400), text(2, 300)))
    session.begin(edited, MOST)
    assert session.index.tokens(TRANSCRIPT).tolist() == edited.tolist()
    session.begin(text(3, 100), MOST)
    assert session.index.tokens(TRANSCRIPT).tolist() == text(3, 100).tolist()
    session.begin(tokens(), MOST)
    assert session.index.length(TRANSCRIPT) == 0
    session.index.check_integrity()


PROMPT = st.builds(lambda at, end: [*range(at), *range(50, end)], st.sampled_from([0, 4, 12, 24]), st.integers(50, 60))


@example([("begin", [1, 2, 3], None), ("release", [], None), ("begin", [1, 2, 3, 4, 5], None), ("release", [], None)])
@given(st.lists(st.tuples(st.sampled_from(["begin", "begin", "release", "forget"]), PROMPT, st.none() | st.just("s"))))
def test_a_prompt_finds_whichever_idle_session_it_continues_furthest(
    actions: list[tuple[str, list[int], str | None]],
) -> None:
    sessions = Sessions()
    held: list[Session] = []
    for action, prompt, name in actions:
        if action == "begin":
            best = max((one.continued_by(tokens(*prompt)) for one in sessions if not one.busy), default=0)
            session = sessions.acquire(name, tokens(*prompt))
            if name is None and prompt:
                assert (session.continued_by(tokens(*prompt)) if session.index.sequence_count else 0) == best
            session.begin(tokens(*prompt), MOST)
            held.append(session)
        elif held:
            getattr(sessions, action)(held.pop(len(prompt) % len(held)))
    for session in held:
        sessions.release(session)
    while sessions.evict():
        pass
    assert (len(sessions), sessions.busy, sessions.memory_bytes) == (0, 0, 0)
