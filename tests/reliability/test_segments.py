"""I7: crafted files in the cache's folder are refused, take no memory beyond their size, and run no code."""

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

from agentspec.cache import _native
from agentspec.cache.index import SuffixIndex
from agentspec.cache.storage.codec import decode
from agentspec.cache.storage.segments import Coverage, load_index, read_segment, segment_of
from agentspec.cache.tokens import SequenceMeta
from agentspec.errors import CacheError, CacheFormatError
from agentspec.types import Namespace, Source
from tests.cache.native_index import NativeDrafter

pytestmark = pytest.mark.reliability

SPACE = Namespace("tenant", "model", "tokenizer", "template")
ITEMS = (32, 12, 4, 4)  # bytes of an item of each part: sequences, pieces, run, log
FIXED = 8 + 8 + 12 * 8  # bytes before the checksum of the head


def a_segment(sequences: int, length: int) -> bytes:
    index, meta, rng = SuffixIndex(tail=4), {}, np.random.default_rng(0)
    for number in range(sequences):
        index.append(number, rng.integers(0, 900, length).astype(np.int32))
        meta[number] = SequenceMeta(f"session {number}", float(number), 5)
    frozen = index.freeze(np.array(list(meta)))
    segment = segment_of(SPACE, Coverage(7, len(meta), 3), frozen, meta)
    return segment.head() + b"".join(part.tobytes() for part in frozen)


def opened(data: bytes) -> tuple[SuffixIndex, list[int]]:
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(data)
        file.seek(0)
        return load_index(file, read_segment(file, SPACE.key))


def checksum(data: bytes) -> int:
    return _native.checksum(np.frombuffer(data, dtype=np.uint8))


def sealed(data: bytes) -> bytes:
    """With the checksums that a forger would put in."""
    _, _, _, offset, *counts = struct.unpack_from("=3q9Q", data, 16)[:8]
    sums, at = [], min(offset, len(data))
    for count, size in zip(counts, ITEMS, strict=True):
        sums.append(checksum(data[at : at + min(count * size, len(data))]))
        at += min(count * size, len(data))
    fixed = data[: 16 + 8 * 8] + struct.pack("=4Q", *sums)
    return fixed + struct.pack("=Q", checksum(fixed + data[FIXED + 8 : offset])) + data[FIXED + 8 :]


def forged(data: bytes, rng: np.random.Generator) -> bytes:
    """With one to three numbers replaced: sizes, counts, ids, positions; often by an extreme one."""
    out = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        size = int(rng.choice([1, 4, 8]))
        inside = (16, FIXED) if rng.random() < 0.4 else (FIXED, len(data) - 8)
        at = int(rng.integers(*inside))
        extremes = [0, 1, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), len(data), len(data) // 4]
        value = extremes[rng.integers(len(extremes))] if rng.random() < 0.6 else int.from_bytes(rng.bytes(size))
        out[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
    return sealed(bytes(out)) if rng.random() < 0.8 else bytes(out)


def outcome(data: bytes) -> str:
    """`refused`, or `usable`: all can be read, drafted from, added to and deleted, and every draft is of tokens."""
    try:
        index, numbers = opened(data)
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
    rng, data = np.random.default_rng(count), a_segment(8, 60)
    assert opened(data)[1] == list(range(8)) and sealed(data) == data
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
data, count, seed = segments.a_segment(40, 4000), int(sys.argv[3]), 5
segments.opened(data)[0].check_integrity()
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
