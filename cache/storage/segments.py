"""Segments: files with the cached past outputs of one namespace each, derived from the database and immutable.

A file holds, in the byte order of this machine: a head of fixed size, a table of each sequence's metadata, names,
zeros up to a multiple of 8 bytes, and the parts of the frozen index. Two CRC-32 sums cover all of it: they detect
damage, not forgery. A folder writes segments atomically, and deletes those that are damaged, or hold what was deleted.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.deletion import Scope
from agentspec.cache.index import SuffixIndex
from agentspec.cache.storage.path_lock import PathLock
from agentspec.cache.tokens import SequenceMeta
from agentspec.errors import (
    CacheDamagedError,
    CacheError,
    CacheFormatError,
    CacheNamespaceError,
    CacheVersionError,
    InvalidRequestError,
)
from agentspec.types import Namespace

VERSION = 3

_MAGIC = b"AGENTSEG"
_ORDER = 0x01020304
_KIND = struct.Struct("=8s2I")  # magic, byte order, version: checked before anything else is read
_FIXED = struct.Struct("=3q6Q")  # the three of Coverage, offset of the index, four counts, its checksum
_SUM = struct.Struct("=Q")  # checksum of everything before the index except this number
_HEAD_BYTES = _KIND.size + _FIXED.size + _SUM.size
PartCounts = tuple[int, int, int, int]
"""One number for each of the four parts of a frozen index: sequences, pieces, run, log."""

ITEM_BYTES: PartCounts = (8, 12, 4, 4)
"""Bytes of one item of each part. The first are the numbers of the sequences."""

_TABLE = np.dtype([("created_at", "f8"), ("end", "i4"), ("session", "i4")])  # session: bytes of its name, or -1
_NAMES = struct.Struct("=4I")  # lengths in bytes of a namespace's four names

_SUFFIX, _NEW = ".segment", ".segment.new"
_PATIENCE = 60.0  # seconds that a deletion waits for another process to finish a segment
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Coverage:
    """The database rows that a segment covers: the `rows` rows of its namespace with ids up to `row`."""

    row: int
    rows: int
    newest: int  # number of the sequence in the last row, which tells whether the database is the same


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment without its index. `meta` has one item for each sequence."""

    namespace: Namespace
    coverage: Coverage
    meta: Sequence[SequenceMeta]
    counts: PartCounts
    checksum: int  # of the index
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
        covered = cover.row, cover.rows, cover.newest
        fixed = _KIND.pack(_MAGIC, _ORDER, VERSION)
        fixed += _FIXED.pack(*covered, _HEAD_BYTES + len(body), *self.counts, self.checksum)
        return fixed + _SUM.pack(zlib.crc32(fixed + body)) + body


def segment_of(
    namespace: Namespace, coverage: Coverage, parts: Sequence[NDArray[Any]], known: Mapping[int, SequenceMeta]
) -> Segment:
    """The segment of an index that was frozen to these parts. `known` holds the metadata of all its sequences."""
    meta = [known[number] for number in parts[0].tolist()]
    counts = tuple(part.nbytes // size for part, size in zip(parts, ITEM_BYTES, strict=True))
    checksum = functools.reduce(lambda known, part: zlib.crc32(part.data, known), parts, 0)
    return Segment(namespace, coverage, meta, cast(PartCounts, counts), checksum)


def read_segment(file: BinaryIO, key: str) -> Segment:
    """Read an open segment file, except its index. It must belong to the namespace with that key.

    Raises `CacheVersionError`, `CacheNamespaceError` and `CacheDamagedError`, and `OSError` if it cannot be read.
    """
    size = os.fstat(file.fileno()).st_size
    fixed = file.read(_HEAD_BYTES)
    _require_kind(fixed)
    if len(fixed) < _HEAD_BYTES:
        raise CacheDamagedError("it is cut off")
    row, rows, newest, offset, *numbers = _FIXED.unpack_from(fixed, _KIND.size)
    if not _HEAD_BYTES <= offset <= size:
        raise CacheDamagedError("it is cut off")
    body = file.read(offset - _HEAD_BYTES)
    if zlib.crc32(fixed[: -_SUM.size] + body) != _SUM.unpack(fixed[-_SUM.size :])[0]:
        raise CacheDamagedError("head: checksum")
    namespace, meta = _tables(body, numbers[0])
    if namespace.key != key:
        raise CacheNamespaceError(f"it is of tokenizer {namespace.tokenizer_hash!r} and namespace {namespace.key}")
    *counts, checksum = numbers
    return Segment(namespace, Coverage(row, rows, newest), meta, cast(PartCounts, tuple(counts)), checksum, offset)


def load_index(file: BinaryIO, segment: Segment) -> tuple[SuffixIndex, list[int]]:
    """Map the index of an open segment; also returns its sequence numbers, in the order of its `meta`.

    The file must not change any more; it may be closed and deleted. Raises `CacheDamagedError` if it is not as it was
    frozen, before more is allocated than its size allows, and `CacheError` or `OSError` if it cannot be mapped.
    """
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as whole:
        if zlib.crc32(whole[segment.offset :]) != segment.checksum:
            raise CacheDamagedError("index: checksum")
    try:
        index = SuffixIndex.load(file.fileno(), segment.offset, segment.counts, deferred=True)
    except InvalidRequestError as error:
        raise CacheDamagedError(str(error)) from error
    except MemoryError as error:
        raise CacheError("there is no address space left to map it") from error
    file.seek(segment.offset)
    return index, np.frombuffer(file.read(ITEM_BYTES[0] * segment.counts[0]), dtype=np.int64).tolist()


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


class SegmentFolder:
    """The segments of one cache: one file per namespace, named by its key. All can be rebuilt from the database.

    Without a folder, as on a database server, there are none.
    """

    def __init__(self, folder: Path | None) -> None:
        self.error: str | None = None
        self.skipped = 0  # segments that could not be used
        self.exists = folder is not None
        self._folder = folder or Path(os.devnull)
        self._known: int | None = None  # bytes of all files, as far as this process knows; None: they must be listed

    def failed(self, what: str, error: Exception) -> None:
        """Record a failure, and log it unless its message repeats the last."""
        message = f"{what}: {error}"
        if message != self.error:
            _log.warning("%s; the cache is rebuilt from its database instead", message)
        self.error = message

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """A lock that keeps other processes and threads from writing segments and from deleting sequences.

        Raises `CacheError` if it cannot be acquired.
        """
        if not self.exists:
            yield
            return
        lock = PathLock(self._folder / "segments.lock")
        try:
            acquired = lock.acquire(_PATIENCE)
        except OSError as error:
            raise CacheError(f"segments in {self._folder} cannot be changed: {error}") from error
        if not acquired:
            raise CacheError(
                f"another process has been forgetting, or writing segments, in {self._folder} for more than"
                f" {_PATIENCE:.0f} seconds: try again when it has ended"
            )
        try:
            yield
        finally:
            lock.release()

    def namespaces(self) -> list[str]:
        """The keys of the namespaces that have a segment."""
        try:
            return [path.stem for path in self._files(_SUFFIX)]
        except OSError as error:
            self.failed("segments cannot be looked for", error)
            return []

    def total_bytes(self) -> int:
        total = 0
        with contextlib.suppress(OSError):
            for path in self._files(_SUFFIX, _NEW):
                with contextlib.suppress(OSError):  # another process may just have deleted it
                    total += path.stat().st_size
        self._known = total
        return total

    def known_bytes(self) -> int:
        """Size of all files when they were last listed, with this process's changes since: without a look at each."""
        known = self._known
        return self.total_bytes() if known is None else known

    def size(self, key: str) -> int:
        """Bytes of a namespace's segment; 0 if there is none."""
        with contextlib.suppress(OSError):
            return self._path(key).stat().st_size
        return 0

    def load(self, key: str, wanted: Callable[[Segment], bool]) -> tuple[Segment, SuffixIndex, list[int]] | None:
        """The segment of a namespace, its index and its sequences' numbers, if it can be used and is `wanted`.

        A segment that is damaged, or of another namespace, is deleted. A segment of another version stays until the
        next is saved, for processes of that version.
        """
        try:
            with _opened(self._path(key)) as file:
                segment = read_segment(file, key)
                return (segment, *load_index(file, segment)) if wanted(segment) else None
        except FileNotFoundError:
            return None
        except (OSError, CacheError) as error:
            self.skipped += 1
            self.failed(f"the segment {key}{_SUFFIX} is not used", error)
            if isinstance(error, CacheDamagedError | CacheNamespaceError):
                with contextlib.suppress(OSError):  # another process may have been quicker
                    self._path(key).unlink()
            return None

    def save(self, segment: Segment, parts: Sequence[NDArray[Any]]) -> None:
        """Replace the segment of its namespace, whose index was frozen to `parts`. Raises `OSError` on failure; the
        old segment stays then.
        """
        key = segment.namespace.key
        known, replaced = self._known, self.size(key)
        new = self._folder / f"{key}{_NEW}"
        self._known = None
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(new, flags, 0o600), "wb") as file:
                file.write(segment.head())
                for part in parts:
                    file.write(part.data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, self._path(key))
            _sync_folder(self._folder)
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink()
            raise
        self._known = None if known is None else known + self.size(key) - replaced
        self.error = None

    def delete(self, key: str) -> None:
        """Delete a namespace's segment. A failure is only recorded."""
        size = self.size(key)
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            self.failed(f"the segment {key}{_SUFFIX} cannot be deleted", error)
        else:
            self._known = None if self._known is None else self._known - size

    def clear(self) -> None:
        try:
            self._delete_if(lambda path: True, _SUFFIX)
        except OSError as error:
            self.failed("segments cannot be deleted", error)

    def sweep(self) -> None:
        """Delete unfinished files of a writer that was killed. Only the present writer may call this."""
        with contextlib.suppress(OSError):  # such files do no harm
            self._delete_if(lambda path: True, _NEW)

    def invalidate(self, scope: Scope) -> None:
        """Durably delete every segment that has a sequence in scope, or may have. The caller holds `writing`.

        Raises `CacheError` if a file cannot be deleted.
        """
        try:
            self._delete_if(lambda path: _may_hold(path, scope), _SUFFIX, _NEW)
            if self.exists:
                _sync_folder(self._folder)
        except OSError as error:
            raise CacheError(f"{self._folder}/*{_SUFFIX}* cannot be deleted: {error}; nothing was forgotten") from error

    def _delete_if(self, chosen: Callable[[Path], bool], *endings: str) -> None:
        for path in self._files(*endings):
            if chosen(path):
                self._known = None
                path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{_SUFFIX}"

    def _files(self, *endings: str) -> list[Path]:
        return (
            [self._folder / name for name in os.listdir(self._folder) if name.endswith(endings)] if self.exists else []
        )


def _may_hold(path: Path, scope: Scope) -> bool:
    """Whether sequences in scope may be in a segment: true of one that is unfinished, damaged or of another version."""
    try:
        with _opened(path) as file:
            return read_segment(file, path.stem).covers(scope)
    except (OSError, CacheFormatError):
        return True


def _opened(path: Path) -> BinaryIO:
    """A file for reading. A symbolic link is not followed, and a pipe is not waited for."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no file")
    return os.fdopen(file, "rb", buffering=0)


def _sync_folder(path: Path) -> None:
    """Wait until what was renamed in a folder is durable."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
