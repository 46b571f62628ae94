from __future__ import annotations

import struct
import tempfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.cache import _native
from agentspec.cache.index import SuffixIndex
from agentspec.cache.storage.segments import Coverage, Segment, load_index, read_segment, segment_of
from agentspec.cache.tokens import SequenceMeta, Tokens
from agentspec.errors import (
    CacheDamagedError,
    CacheFormatError,
    CacheNamespaceError,
    CacheVersionError,
)
from agentspec.types import Namespace, Source
from tests.cache.native_index import NativeDrafter, NativeIndex

SPACE = Namespace("tenant", "model", "tokenizer", "template")
_FIXED = 8 + 8 + 12 * 8  # bytes before the checksum of the head


def text(seed: int, length: int, vocabulary: int = 50) -> Tokens:
    return np.random.default_rng(seed).integers(0, vocabulary, length).astype(np.int32)


def packed(index: NativeIndex, meta: dict[int, SequenceMeta], space: Namespace = SPACE) -> bytes:
    frozen = index.freeze(list(meta))
    segment = segment_of(space, Coverage(7, len(meta), 3), frozen, meta)
    return segment.head() + b"".join(part.tobytes() for part in frozen)


def an_index(sequences: int = 6, length: int = 40) -> tuple[NativeIndex, dict[int, SequenceMeta]]:
    index, meta = NativeIndex(tail=4), {}
    for number in range(sequences):
        index.append(number, text(number, length), context=text(100 + number, 9))
        meta[number] = SequenceMeta(f"session {number} é" if number % 3 else None, float(number), 5)
    return index, meta


def opened(data: bytes, space: Namespace = SPACE) -> tuple[Segment, SuffixIndex, list[int]]:
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(data)
        file.seek(0)
        segment = read_segment(file, space.key)
        return segment, *load_index(file, segment)


def checksum(data: bytes) -> int:
    return _native.checksum(np.frombuffer(data, dtype=np.uint8))


def sealed(data: bytes) -> bytes:
    """With the checksums that a forger would put in."""
    _, _, _, offset, *counts = struct.unpack_from("=3q9Q", data, 16)[:8]
    sums, at = [], min(offset, len(data))
    for count, size in zip(counts, (32, 12, 4, 4), strict=True):
        sums.append(checksum(data[at : at + min(count * size, len(data))]))
        at += min(count * size, len(data))
    fixed = data[: 16 + 8 * 8] + struct.pack("=4Q", *sums)
    return fixed + struct.pack("=Q", checksum(fixed + data[_FIXED + 8 : offset])) + data[_FIXED + 8 :]


@given(
    lengths=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 90)), max_size=8),
    sessions=st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"])), min_size=8, max_size=8),
    removed=st.sets(st.integers(0, 7)),
)
def test_what_is_read_is_what_was_written(
    lengths: list[tuple[int, int]], sessions: list[str | None], removed: set[int]
) -> None:
    index, meta = NativeIndex(tail=8), {}
    for number, (length, context) in enumerate(lengths):
        index.append(number, text(number, length, 4), context=text(-number - 1 + 1000, context, 4))
        meta[number] = SequenceMeta(sessions[number], number / 3, number)
    kept = {number: one for number, one in meta.items() if number not in removed}
    segment, loaded, numbers = opened(packed(index, kept))
    index.remove(list(removed))
    assert segment.namespace == SPACE and segment.coverage == Coverage(7, len(kept), 3)
    assert dict(zip(numbers, segment.meta, strict=True)) == kept
    loaded.check_integrity()
    for number in kept:
        assert loaded.tokens(number).tolist() == index.tokens(number).tolist()
        assert loaded.prefix(number).tolist() == index.prefix(number).tolist()
    for context in ([0], [1, 2], [3, 3, 1, 0]):
        drafts = [
            NativeDrafter(scan_limit=1 << 20).draft([(each, Source.SHARED)], context, 16) for each in (index, loaded)
        ]
        assert drafts[0].tokens.tolist() == drafts[1].tokens.tolist()
        assert drafts[0].probabilities.tolist() == drafts[1].probabilities.tolist()


def test_a_loaded_index_grows_and_forgets_like_any_other() -> None:
    index, meta = an_index(20, 200)
    _, loaded, _ = opened(packed(index, meta))
    file_bytes = loaded.mapped_bytes()
    assert file_bytes == 20 * 200 * 4  # positions; the log is less than a chunk
    for each in (index, loaded):
        each.append(3, text(7, 3000))
        each.append(99, text(8, 400_000))  # more than the room behind the file
        each.remove(np.array([1, 2, 98]))
        each.truncate(99, 1000)
    loaded.check_integrity()
    assert loaded.mapped_bytes() <= file_bytes
    for number in (0, 3, 99):
        assert loaded.tokens(number).tolist() == index.tokens(number).tolist()
    for token in range(50):
        assert loaded.count(np.array([token], dtype=np.int32)) == index.count([token])


# Files that are not as they should be.


def test_every_flipped_bit_is_noticed() -> None:
    data = packed(*an_index())
    places = np.random.default_rng(0).choice(8 * len(data), 1000, replace=False).tolist()
    for place in (*places, *range(8 * _FIXED, 8 * _FIXED + 64)):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises(CacheFormatError):
            opened(bytes(flipped))


def patched(data: bytes, part: int, item: int, field: int, value: int) -> bytes:
    """With another 32-bit number in a part of the index, and checksums that hold."""
    _, _, _, offset, *counts = struct.unpack_from("=3q9Q", data, 16)[:8]
    sizes = (32, 12, 4, 4)
    at = offset + sum(count * size for count, size in zip(counts[:part], sizes[:part], strict=True))
    at += item % counts[part] * sizes[part] + 4 * field
    return sealed(data[:at] + struct.pack("=I", value) + data[at + 4 :])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ((3, 5, 0, 7), "no padding"),
        ((3, -1, 0, 2**32 - 1), "boundaries and pieces"),
        ((3, -1, 0, 2**32 - 2), "negative token"),
        ((3, -1, 0, 2**31 - 1), "token above"),
        ((2, 0, 0, 2**32 - 1), "position of no token"),
        ((2, 0, 0, 66), "position of no token"),
        ((2, 0, 0, 0), "position of no token"),
        ((1, 0, 0, 2**31), "out of place"),
        ((1, 1, 0, 70), "out of place"),
        ((1, 1, 1, 2**32 - 1), "outside the log"),
        ((1, 1, 1, 0), "outside the log"),
        ((1, 0, 2, 99), "no sequence"),
        ((1, 0, 2, 1), "without a place"),
        ((0, 1, 0, 0), "twice"),
        ((0, 1, 3, 2**31), "impossible counts"),
        ((0, 1, 5, 2**31 - 1), "impossible counts"),
    ],
)
def test_forged_indexes(change: tuple[int, int, int, int], reason: str) -> None:
    data = packed(*an_index())
    assert sealed(data) == data
    with pytest.raises(CacheDamagedError, match=reason):
        opened(patched(data, *change))


def with_run(data: bytes, run: np.ndarray) -> bytes:
    """With another run, and checksums that hold."""
    _, _, _, offset, *counts = struct.unpack_from("=3q9Q", data, 16)[:8]
    at = offset + counts[0] * 32 + counts[1] * 12
    return sealed(data[:at] + run.astype(np.uint32).tobytes() + data[at + 4 * counts[2] :])


@pytest.mark.parametrize("order", ["shuffled", "reversed", "rotated", "halves", "by position"])
def test_a_run_in_a_wrong_order_is_safe(order: str) -> None:
    """The right positions in a wrong order, in a run with tables: matches are missed, nothing outside is read."""
    rng, index = np.random.default_rng(3), NativeIndex()
    for number in range(4):
        common = np.where(rng.random(4000) < 0.4, 7, rng.integers(0, 40, 4000))
        index.append(number, common.astype(np.int32), context=text(number, 9))
    meta = {number: SequenceMeta(None, 0.0, 5) for number in range(4)}
    _, _, right, _ = index.freeze(range(4))
    for _ in range(20):
        run = {
            "shuffled": lambda: rng.permutation(right),
            "reversed": lambda: right[::-1],
            "rotated": lambda: np.roll(right, int(rng.integers(1, len(right)))),
            "halves": lambda: np.concatenate((right[::2], right[1::2])),
            "by position": lambda: np.sort(right),
        }[order]()
        _, loaded, numbers = opened(with_run(packed(index, meta), run))
        drafter = NativeDrafter(scan_limit=int(rng.integers(1, 100)))
        for at in range(0, 400, 40):
            context = index.tokens(int(rng.integers(4)))[at : at + int(rng.integers(1, 40))]
            assert (drafter.draft([(loaded, Source.SHARED)], context, 32).tokens >= 0).all()
            drafter.observe([(loaded, Source.SHARED)], context, context[:5])
            for length in (1, 2, 3, 9):
                loaded.count(context[-length:])
        loaded.append(9, text(5, 5000))
        loaded.remove(np.array(numbers[:2]))


def test_a_run_that_holds_a_position_twice_is_refused() -> None:
    index, meta = an_index()
    _, _, run, _ = index.freeze(list(meta))
    for wrong in (np.full_like(run, run[3]), np.append(run[:-1], run[0])):
        with pytest.raises(CacheDamagedError, match="twice"):
            opened(with_run(packed(index, meta), wrong))


def test_three_distinct_refusals() -> None:
    data = packed(*an_index())
    with pytest.raises(CacheNamespaceError, match="'tokenizer'"):
        opened(data, Namespace("tenant", "model", "another", "template"))
    with pytest.raises(CacheVersionError, match="version 3, not 2"):
        opened(data[:12] + struct.pack("=I", 3) + data[16:])
    with pytest.raises(CacheVersionError, match="byte order"):
        opened(data[:8] + data[8:12][::-1] + data[12:])
    with pytest.raises(CacheDamagedError, match="no segment"):
        opened(b"SQLite format 3\0" + data[16:])
