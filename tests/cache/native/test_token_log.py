"""Removed text leaves the log of an index chunk by chunk: without large copies, and without a trace in any answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentspec.cache._native import IndexView, SuffixIndex
from agentspec.cache.storage.segments import Coverage, segment_of
from agentspec.cache.tokens import SequenceMeta
from agentspec.types import Namespace, Source
from tests.cache.native_index import NativeDrafter, NativeIndex
from tests.cache.reference import ReferenceDrafter, ReferenceIndex

CHUNK = 4 * (1 << 16)  # bytes of the log that lie together
PIECE = 4 * (1 << 16)  # of a run that is merged in pieces
ROOM = 1 << 16  # for what few new tokens take


def filled(sequences: int, length: int, *, seed: int = 0, deferred: bool = False) -> NativeIndex:
    rng = np.random.default_rng(seed)
    index = NativeIndex(deferred=deferred)
    for number in range(sequences):
        index.append(number, rng.integers(0, 50_000, length, dtype=np.int32))
        while index.merge_step():
            pass
    return index


def test_removing_takes_no_large_copy() -> None:
    """A third of the outputs goes, here and there, while more arrive: the peak is hardly above what there was."""
    index = filled(3000, 200, deferred=True)
    full, gone = index.memory_bytes(), list(range(0, 3000, 3))
    texts = {number: index.tokens(number) for number in (1, 2, 1501, 2998)}
    lost = index.tokens(gone[7])
    index.remove(gone)
    while index.merge_step():
        index.append(3000, [1, 2, 3])
        assert index.memory_bytes() <= full + CHUNK + PIECE
    assert index.memory_bytes() <= 0.8 * full  # two thirds, and what is left in blocks at the edges of texts
    index.check_integrity()
    for number, text in texts.items():
        np.testing.assert_array_equal(index.tokens(number), text)
        assert (index.count(text[:150]), index.common_prefix(number, text)) == (1, 200)
    assert index.count(lost[:20]) == 0


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_merge_waits_for_a_draft_that_still_reads_what_it_replaced(steps: int) -> None:
    """Beside a draft that does not come to its end, what is merged is not held twice, and more text may come and go."""
    index = filled(100, 4000, deferred=True)
    index.remove(range(0, 100, 4))
    full, most = index.memory_bytes(), [0]
    for _ in range(steps):
        assert index.merge_step()
    draft = IndexView(index)
    for number in range(100, 116):
        index.merge_step()
        index.append(number, [number] * 10)
        index.remove([number - 2])
        most.append(index.memory_bytes())
    assert max(most) <= full + 2 * PIECE + ROOM
    assert not index.merge_step() and index.merging_due, "it is not waited for"
    del draft
    while index.merge_step():
        most.append(index.memory_bytes())
    assert max(most) <= full + 2 * PIECE + ROOM
    assert index.memory_bytes() <= 0.8 * full
    index.check_integrity()


def test_a_few_removed_tokens_hold_no_memory_back() -> None:
    """Runs always hold some removed tokens that are too few to be taken out: all other removed text is given back."""
    index = filled(100, 2000, deferred=True)
    for number in range(100, 140):
        index.append(number, [number] * 10)
        while index.merge_step():
            pass
    full, left = index.memory_bytes(), list(range(100, 140))
    index.remove(range(20, 70))
    while index.merge_step():
        index.remove([left.pop()] if left else [])
        assert index.memory_bytes() <= full + CHUNK + PIECE
    assert index.memory_bytes() < 0.65 * full
    index.check_integrity()


def test_a_mapped_log_is_copied_by_chunks(tmp_path: Path) -> None:
    """Neither appending to a mapped log nor removing from it copies all of it, and what goes is unmapped."""
    parts = filled(1500, 200).freeze(list(range(1500)))
    meta = {number: SequenceMeta(None, 0.0, 0) for number in range(1500)}
    head = segment_of(Namespace("t"), Coverage(0, 0, 0), parts, meta)
    path = tmp_path / "index"
    path.write_bytes(b"".join(part.tobytes() for part in parts))
    with path.open("rb") as file:
        index = SuffixIndex.load(file.fileno(), 0, head.counts, deferred=True)
    full, mapped, text = index.memory_bytes(), index.mapped_bytes(), index.tokens(1499)
    index.append(1500, text)
    assert index.memory_bytes() <= full + ROOM
    assert index.mapped_bytes() == mapped
    index.remove(np.arange(0, 1500, 2))
    while index.merge_step():
        assert index.memory_bytes() <= full + CHUNK + PIECE
    assert index.mapped_bytes() < mapped // 2
    index.check_integrity()
    assert index.successors(text[:100])[1].tolist() == [2]


def removed_filler(texts: list[list[int]], fillers: int) -> NativeIndex:
    """An index of the texts with removed text around each that fills chunks."""
    index = NativeIndex()
    for number, text in enumerate(texts):
        index.append(1000 + number, np.arange(10, 10 + fillers, dtype=np.int32))
        index.append(number, text, texts[number - 1][:5] if number else [])
    index.append(2000, np.arange(10, 70_010, dtype=np.int32))  # nothing before is in the last chunk
    index.remove([*range(1000, 1000 + len(texts)), 2000])
    return index


@settings(max_examples=15)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=60), min_size=2, max_size=12),
    st.sampled_from([9, 300, 20_000]),
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
)
def test_drafts_are_those_of_the_twin_that_never_held_what_was_removed(
    texts: list[list[int]], fillers: int, context: list[int]
) -> None:
    native, twin = removed_filler(texts, fillers), ReferenceIndex()
    for number, text in enumerate(texts):
        twin.append(number, text, texts[number - 1][:5] if number else [])
    native.check_integrity()
    counts, newest = twin.successors(context)
    found = native.successors(context)
    assert dict(zip(found.tokens.tolist(), found.counts.tolist(), strict=True)) == counts
    assert found.most_recent == newest
    draft = NativeDrafter(scan_limit=1 << 30).draft([(native, Source.SHARED)], context, 8)
    rows = ReferenceDrafter().draft([(twin, int(Source.SHARED))], context, 8, 0.0, False)
    assert draft.tokens.tolist() == [row[0] for row in rows]
    assert draft.parents.tolist() == [row[1] for row in rows]
    np.testing.assert_allclose(draft.probabilities, [row[2] for row in rows], rtol=0, atol=1e-6)
