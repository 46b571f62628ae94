"""Segments: what is read is what was written; I7: crafted files are refused, take little memory, and run no code."""

from __future__ import annotations

import functools
import re
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.cache.index import SuffixIndex
from agentspec.cache.storage.codec import decode
from agentspec.cache.storage.segments import Coverage, Segment, load_index, read_segment, segment_of
from agentspec.cache.tokens import SequenceMeta, Tokens
from agentspec.errors import (
    CacheDamagedError,
    CacheError,
    CacheFormatError,
    CacheNamespaceError,
    CacheVersionError,
)
from agentspec.types import Namespace, Source
from tests.cache.native_index import NativeDrafter, NativeIndex

SPACE = Namespace("tenant", "model", "tokenizer", "template")
_FIXED = 8 + 8 + 9 * 8  # bytes before the checksum of the head


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


def sealed(data: bytes) -> bytes:
    """With the checksums that a forger would put in."""
    (offset,) = struct.unpack_from("=Q", data, 40)
    fixed = data[: 16 + 8 * 8] + struct.pack("=Q", zlib.crc32(data[offset:]))
    return fixed + struct.pack("=Q", zlib.crc32(fixed + data[_FIXED + 8 : offset])) + data[_FIXED + 8 :]


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
        found = loaded.successors(np.array([token], np.int32))
        for each, other in zip(found[:2], index.successors([token])[:2], strict=True):
            np.testing.assert_array_equal(each, other)


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
    _, _, _, offset, *counts = struct.unpack_from("=3q5Q", data, 16)
    sizes = (8, 12, 4, 4)
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
    ],
)
def test_forged_indexes(change: tuple[int, int, int, int], reason: str) -> None:
    data = packed(*an_index())
    assert sealed(data) == data
    with pytest.raises(CacheDamagedError, match=reason):
        opened(patched(data, *change))


def with_run(data: bytes, run: np.ndarray) -> bytes:
    """With another run, and checksums that hold."""
    _, _, _, offset, *counts = struct.unpack_from("=3q5Q", data, 16)
    at = offset + counts[0] * 8 + counts[1] * 12
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
                loaded.successors(context[-length:])
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
    with pytest.raises(CacheVersionError, match="version 2, not 3"):
        opened(data[:12] + struct.pack("=I", 2) + data[16:])
    with pytest.raises(CacheVersionError, match="byte order"):
        opened(data[:8] + data[8:12][::-1] + data[12:])
    with pytest.raises(CacheDamagedError, match="no segment"):
        opened(b"SQLite format 3\0" + data[16:])


# Forged at random.


def forged(data: bytes, rng: np.random.Generator) -> bytes:
    """With one to three numbers replaced: sizes, counts, ids, positions; often by an extreme one."""
    out = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        size = int(rng.choice([1, 4, 8]))
        inside = (16, _FIXED) if rng.random() < 0.4 else (_FIXED, len(data) - 8)
        at = int(rng.integers(*inside))
        extremes = [0, 1, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), len(data), len(data) // 4]
        value = extremes[rng.integers(len(extremes))] if rng.random() < 0.6 else int.from_bytes(rng.bytes(size))
        out[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
    return sealed(bytes(out)) if rng.random() < 0.8 else bytes(out)


def outcome(data: bytes) -> str:
    """`refused`, or `usable`: all can be read, drafted from, added to and deleted, and every draft is of tokens."""
    try:
        _, index, numbers = opened(data)
    except CacheFormatError:
        return "refused"
    for number in numbers:
        assert (index.tokens(number) >= 0).all() and (index.prefix(number) >= 0).all()
    for context in (index.tokens(numbers[0])[:20], np.arange(5, dtype=np.int32)):
        draft = NativeDrafter().draft([(index, Source.SHARED)], context, 16)
        assert (draft.tokens >= 0).all() and (draft.parents < np.arange(len(draft))).all()
    index.append(10**6, np.array([1, 2, 3] * 100, dtype=np.int32))
    index.remove(np.array(numbers[:3]))
    return "usable"


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_i7_forged_segments_are_refused_or_harmless(count: int) -> None:
    """What passes holds other tokens, or the right ones out of order: worse drafts, and no harm to anything else."""
    rng, data = np.random.default_rng(count), packed(*an_index(8, 60))
    assert opened(data)[2] == list(range(8)) and sealed(data) == data
    outcomes = [outcome(forged(data, rng)) for _ in range(count)]
    assert outcomes.count("refused") > 0.5 * count


BOUNDED = """
import resource, sys
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[1])
import importlib.util
spec = importlib.util.spec_from_file_location("segments", sys.argv[2])
segments = importlib.util.module_from_spec(spec)
spec.loader.exec_module(segments)
data, count, seed = segments.packed(*segments.an_index(40, 4000)), int(sys.argv[3]), 5
segments.opened(data)[1].check_integrity()
rng = np.random.default_rng(seed)
files = [segments.forged(data, rng) for _ in range(count)]
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + 4 * len(data)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for file in files:
    segments.outcome_within(file)
print("bounded")
"""


def outcome_within(data: bytes) -> None:
    """Open a file in a process whose memory is limited: asking for too much raises `MemoryError` or `CacheError`."""
    try:
        opened(data)
    except CacheFormatError:
        return
    except (CacheError, MemoryError):
        raise SystemExit("took more than four times the size of the file") from None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.long)])
def test_i7_no_forged_segment_takes_four_times_its_size(count: int, repository: Path) -> None:
    command = [sys.executable, "-c", BOUNDED, str(repository), __file__, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "bounded", done.stderr


def a_row(**changed: Any) -> Any:
    tokens = np.arange(100, dtype="<i4")
    fields = {"id": 1, "number": 1, "tenant": "t", "model_fingerprint": "", "tokenizer_hash": "", "template_hash": ""}
    names = dict.fromkeys(("session", "workflow", "step"))
    key = {"namespace": Namespace("t").key}
    packed = {"tokens": zlib.compress(tokens.tobytes()), "token_count": 100, "created_at": 0.0}
    return SimpleNamespace(**{**fields, **names, **key, **packed, **changed})


@functools.cache
def bomb() -> bytes:
    """Not made where the module is imported: that takes a second, in every process that collects the tests."""
    return zlib.compress(bytes(1 << 26), 9)


@pytest.mark.parametrize(
    "changed",
    [
        {"tokens": bomb},
        {"tokens": bomb, "token_count": 2**62},
        {"tokens": bomb, "token_count": -1},
        {"tokens": zlib.compress(b"odd")},
        {"tokens": zlib.compress(np.arange(100).astype("<i4").tobytes())[:-3]},
        {"tokens": zlib.compress(np.full(100, -5, "<i4").tobytes())},
        {"token_count": 101},
        {"token_count": -1},
        {"tokens": b""},
    ],
    ids=["bomb", "bomb-huge-count", "bomb-negative", "odd", "cut", "negative-ids", "count", "negative-count", "empty"],
)
def test_i7_forged_rows_are_refused(changed: dict[str, Any]) -> None:
    assert len(decode(a_row()).tokens) == 100
    changed = {name: value() if callable(value) else value for name, value in changed.items()}
    with pytest.raises(CacheFormatError):
        decode(a_row(**changed))


# No code in data.

RUNS_DATA = re.compile(
    r"^\s*(?:import|from) +(?:_?c?pickle|dill|cloudpickle|marshal|shelve|jsonpickle|yaml|joblib)\b"
    r"|(?<![\w.`])(?<!def )(?:eval|exec|compile|__import__)\(|\btorch\.load\(|allow_pickle(?!=False)",
    re.IGNORECASE | re.MULTILINE,
)


def test_i7_nothing_we_write_can_run_code_found_in_data(repository: Path) -> None:
    packages = ("agentspec", "cache", "backends", "reasoning", "benchmarks")
    files = [file for package in packages for file in (repository / package).rglob("*.py")]
    assert [str(file) for file in files if RUNS_DATA.search(file.read_text())] == []
    for code in ("import pickle", "from marshal import loads", "eval('1')", "torch.load(x)", "f(x, allow_pickle=True)"):
        assert RUNS_DATA.search(code)
