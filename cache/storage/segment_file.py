"""A segment: one file with the cached past outputs of one namespace, derived from the database and immutable.

The file holds, in the byte order of this machine: a head of fixed size, a table of each sequence's metadata, names,
zeros up to a multiple of 8 bytes, and the parts of the frozen index. Checksums cover all of it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, cast

import numpy as np

from agentspec.cache.deletion import Scope
from agentspec.cache.index import ITEM_BYTES, Frozen, PartCounts, SuffixIndex, checksum, sequence_numbers
from agentspec.cache.record import SequenceMeta
from agentspec.errors import CacheDamagedError, CacheNamespaceError, CacheVersionError
from agentspec.types import Namespace

VERSION = 1

_MAGIC = b"AGENTSEG"
_ORDER = 0x01020304
_KIND = struct.Struct("=8s2I")  # magic, byte order, version: checked before anything else is read
_FIXED = struct.Struct("=4q9Q")  # the four of Coverage, offset of the index, four counts, four checksums
_SUM = struct.Struct("=Q")  # checksum of everything before the index except this number
_HEAD_BYTES = _KIND.size + _FIXED.size + _SUM.size
_TABLE = np.dtype([("created_at", "f8"), ("end", "i4"), ("session", "i4")])  # session: bytes of its name, or -1
_NAMES = struct.Struct("=4I")  # lengths in bytes of a namespace's four names


@dataclass(frozen=True, slots=True)
class Coverage:
    """The database rows that a segment covers: the `rows` rows of its namespace with ids up to `row`."""

    row: int
    rows: int
    newest: int  # number of the sequence in the last row, which tells whether the database is the same
    deletion: int  # deletions up to this number are applied


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment without its index. `meta` has one item for each sequence."""

    namespace: Namespace
    coverage: Coverage
    meta: Sequence[SequenceMeta]
    counts: PartCounts
    checksums: PartCounts
    offset: int = 0  # of the index in the file

    @property
    def index_bytes(self) -> int:
        """Size of the index in the file, which is nearly all of the file."""
        return sum(count * size for count, size in zip(self.counts, ITEM_BYTES, strict=True))

    def covers(self, scope: Scope) -> bool:
        """Whether any sequence of the segment lies in a scope."""
        if not scope.concerns(self.namespace):
            return False
        oldest: dict[str | None, float] = {}  # of each session, whose name is hashed once
        for session, created_at, _ in self.meta:
            oldest[session] = min(created_at, oldest.get(session, created_at))
        return any(scope.covers(session, created_at) for session, created_at in oldest.items())

    def head(self) -> bytes:
        """The bytes before the index."""
        space = self.namespace
        names = [
            _encode(name) for name in (space.tenant, space.model_fingerprint, space.tokenizer_hash, space.template_hash)
        ]
        sessions = [None if one.session is None else _encode(one.session) for one in self.meta]
        table = np.array(
            [
                (one.created_at, one.end, -1 if name is None else len(name))
                for one, name in zip(self.meta, sessions, strict=True)
            ],
            dtype=_TABLE,
        )
        body = b"".join((_NAMES.pack(*map(len, names)), table.tobytes(), *names, *(name or b"" for name in sessions)))
        body += bytes(-(_HEAD_BYTES + len(body)) % 8)
        cover = self.coverage
        covered = cover.row, cover.rows, cover.newest, cover.deletion
        fixed = _KIND.pack(_MAGIC, _ORDER, VERSION)
        fixed += _FIXED.pack(*covered, _HEAD_BYTES + len(body), *self.counts, *self.checksums)
        return fixed + _SUM.pack(checksum(fixed + body)) + body


def segment_of(namespace: Namespace, coverage: Coverage, frozen: Frozen, known: Mapping[int, SequenceMeta]) -> Segment:
    """The segment of a frozen index. `known` holds the metadata of all its sequences."""
    meta = [known[number] for number in frozen.numbers.tolist()]
    return Segment(namespace, coverage, meta, frozen.counts, frozen.checksums)


def read_segment(file: BinaryIO, key: str) -> Segment:
    """Read an open segment file, except its index. It must belong to the namespace with that key.

    Raises `CacheVersionError`, `CacheNamespaceError` and `CacheDamagedError`, and `OSError` if it cannot be read.
    """
    size = os.fstat(file.fileno()).st_size
    fixed = file.read(_HEAD_BYTES)
    _require_kind(fixed)
    if len(fixed) < _HEAD_BYTES:
        raise CacheDamagedError("it is cut off")
    row, rows, newest, deletion, offset, *numbers = _FIXED.unpack_from(fixed, _KIND.size)
    if not _HEAD_BYTES <= offset <= size:
        raise CacheDamagedError("it is cut off")
    body = file.read(offset - _HEAD_BYTES)
    if checksum(fixed[: -_SUM.size] + body) != _SUM.unpack(fixed[-_SUM.size :])[0]:
        raise CacheDamagedError("head: checksum")
    namespace, meta = _tables(body, numbers[0])
    if namespace.key != key:
        raise CacheNamespaceError(f"it is of tokenizer {namespace.tokenizer_hash!r} and namespace {namespace.key}")
    counts, checksums = cast(PartCounts, tuple(numbers[:4])), cast(PartCounts, tuple(numbers[4:]))
    return Segment(namespace, Coverage(row, rows, newest, deletion), meta, counts, checksums, offset)


def load_index(file: BinaryIO, segment: Segment) -> tuple[SuffixIndex, list[int]]:
    """Map the index of an open segment; also returns its sequence numbers, in the order of its `meta`.

    Raises `CacheDamagedError`, and `CacheError` if the index cannot be mapped.
    """
    index = SuffixIndex.load(file.fileno(), segment.offset, segment.counts, segment.checksums, deferred=True)
    file.seek(segment.offset)
    records = np.frombuffer(file.read(ITEM_BYTES[0] * segment.counts[0]), dtype=np.uint8)
    return index, sequence_numbers(records).tolist()


def _require_kind(fixed: bytes) -> None:
    if len(fixed) < _KIND.size or not fixed.startswith(_MAGIC):
        raise CacheDamagedError("it is no segment")
    _, order, version = _KIND.unpack_from(fixed)
    if order != _ORDER:
        raise CacheVersionError("it was written by a machine with another byte order")
    if version != VERSION:
        raise CacheVersionError(f"it is of version {version}, not {VERSION}")


def _tables(body: bytes, count: int) -> tuple[Namespace, list[SequenceMeta]]:
    """The namespace and the `meta`. The checksum was right, so that wrong lengths can only be deliberate forgery."""
    begin = _NAMES.size + count * _TABLE.itemsize
    if len(body) < begin:
        raise CacheDamagedError("tables longer than the file")
    table = np.frombuffer(body, dtype=_TABLE, count=count, offset=_NAMES.size)
    lengths = [*_NAMES.unpack_from(body), *table["session"].tolist()]
    try:
        names = list(_names(body, begin, lengths))
    except ValueError as error:
        raise CacheDamagedError(f"names: {error}") from error
    columns = zip(names[4:], table["created_at"].tolist(), table["end"].tolist(), strict=True)
    return Namespace(*(name or "" for name in names[:4])), [*map(SequenceMeta._make, columns)]


def _names(body: bytes, at: int, lengths: Sequence[int]) -> Iterator[str | None]:
    for length in lengths:
        if length < 0:
            yield None
            continue
        if at + length > len(body):
            raise ValueError("longer than the file")
        yield body[at : at + length].decode(errors="surrogatepass")
        at += length


def _encode(name: str) -> bytes:
    return name.encode(errors="surrogatepass")  # a name may be any string of Python's, lone surrogates included
