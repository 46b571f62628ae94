"""The segment files of one folder: writes them atomically, renames damaged files and deletes files not to be kept."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from agentspec.cache.deletion import Scope
from agentspec.cache.index import Frozen, SuffixIndex
from agentspec.cache.storage.path_lock import PathLock
from agentspec.cache.storage.segment_file import Segment, load_index, read_segment
from agentspec.errors import CacheDamagedError, CacheError, CacheFormatError, CacheNamespaceError

_SUFFIX, _NEW, _CORRUPT = ".segment", ".segment.new", ".segment.corrupt"
_PATIENCE = 60.0  # seconds that a deletion waits for another process to finish a segment
_log = logging.getLogger(__name__)


class LocalFiles:
    """The file operations that segments need, by name in one folder. Tests replace this class by one that fails.

    Every method may raise `OSError`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def names(self) -> list[str]:
        return os.listdir(self._path)

    def size(self, name: str) -> int:
        return (self._path / name).stat().st_size

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading. A symbolic link is not followed, and a pipe is not waited for."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        file = os.open(self._path / name, flags)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(errno.EINVAL, "it is no file")
        return os.fdopen(file, "rb", buffering=0)

    def create(self, name: str) -> BinaryIO:
        """Open an empty file for writing; truncates an existing file. Only the owner may read it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.fdopen(os.open(self._path / name, flags, 0o600), "wb")

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        file.write(data)

    def sync(self, file: BinaryIO) -> None:
        """Wait until everything written is on disk."""
        file.flush()
        os.fsync(file.fileno())

    def rename(self, old: str, new: str) -> None:
        """Rename a file atomically and durably, replacing any file with the new name."""
        os.replace(self._path / old, self._path / new)
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def unlink(self, name: str) -> None:
        """Delete a file; no error if it does not exist."""
        (self._path / name).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class LoadedSegment:
    """A segment in use: its metadata, its index, and its sequence numbers in the order of `segment.meta`."""

    segment: Segment
    index: SuffixIndex
    sequences: list[int]


class SegmentFolder:
    """The segments of one cache: one file per namespace, named by its key. All can be rebuilt from the database."""

    kept = True

    def __init__(self, folder: Path, files: LocalFiles | None = None) -> None:
        self.error: str | None = None
        self.skipped = 0  # segments that could not be used
        self._known: int | None = None  # bytes of all files, as far as this process knows; None: they must be listed
        self._counting = threading.Lock()
        self._folder = folder
        self._files = files or LocalFiles(folder)

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
            return [name.removesuffix(_SUFFIX) for name in self._named(_SUFFIX)]
        except OSError as error:
            self.failed("segments cannot be looked for", error)
            return []

    def total_bytes(self) -> int:
        """Size of all files."""
        total = 0
        with self._counting:
            with contextlib.suppress(OSError):
                for name in self._named(_SUFFIX, _NEW, _CORRUPT):
                    with contextlib.suppress(OSError):  # another process may just have deleted it
                        total += self._files.size(name)
            self._known = total
        return total

    def known_bytes(self) -> int:
        """Size of all files when they were last listed, with this process's changes since: without a look at each."""
        known = self._known
        return self.total_bytes() if known is None else known

    def size(self, key: str) -> int:
        """Bytes of a namespace's segment; 0 if there is none."""
        with contextlib.suppress(OSError):
            return self._files.size(key + _SUFFIX)
        return 0

    def load(self, key: str, wanted: Callable[[Segment], bool]) -> LoadedSegment | None:
        """The segment of a namespace, if it can be used and `wanted(segment)` is true.

        A segment that is damaged, or of another namespace, is renamed. A segment of another version stays until the
        next is saved, for processes of that version.
        """
        try:
            with self._files.open(key + _SUFFIX) as file:
                segment = read_segment(file, key)
                return LoadedSegment(segment, *load_index(file, segment)) if wanted(segment) else None
        except FileNotFoundError:
            return None
        except (OSError, CacheError) as error:
            self.skipped += 1
            self.failed(f"the segment {key}{_SUFFIX} is not used", error)
            if isinstance(error, CacheDamagedError | CacheNamespaceError):
                with contextlib.suppress(OSError):  # another process may have been quicker
                    self._files.rename(key + _SUFFIX, key + _CORRUPT)
            return None

    def save(self, segment: Segment, frozen: Frozen) -> None:
        """Replace the segment of its namespace. Raises `OSError` on failure; the old segment stays then."""
        key = segment.namespace.key
        head, replaced = segment.head(), 0 if self._known is None else self.size(key)
        try:
            with self._files.create(key + _NEW) as file:
                self._files.write(file, head)
                for part in frozen.parts:
                    self._files.write(file, part.data)
                self._files.sync(file)
            with self._counting:
                self._files.rename(key + _NEW, key + _SUFFIX)
                if self._known is not None:
                    self._known += len(head) + segment.index_bytes - replaced
        except BaseException:
            self._known = None
            with contextlib.suppress(OSError):
                self._files.unlink(key + _NEW)
            raise
        self.error = None

    def delete(self, key: str) -> None:
        """Delete a namespace's segment. A failure is only recorded."""
        size = 0 if self._known is None else self.size(key)
        try:
            with self._counting:
                self._files.unlink(key + _SUFFIX)
                if self._known is not None:
                    self._known -= size
        except OSError as error:
            self.failed(f"the segment {key}{_SUFFIX} cannot be deleted", error)

    def clear(self) -> None:
        """Delete all segments, to make room."""
        self._known = None
        try:
            for name in self._named(_SUFFIX, _CORRUPT):
                self._files.unlink(name)
        except OSError as error:
            self.failed("segments cannot be deleted", error)

    def sweep(self) -> None:
        """Delete unfinished files of a writer that was killed. Only the present writer may call this."""
        self._known = None
        with contextlib.suppress(OSError):  # such files do no harm
            for name in self._named(_NEW):
                self._files.unlink(name)

    def invalidate(self, scope: Scope) -> None:
        """Delete every segment that has a sequence in scope, or may have. The caller holds `writing`.

        Raises `CacheError` if a file cannot be deleted; deleted sequences may still be in it then.
        """
        self._known = None
        try:
            for name in self._named(_SUFFIX, _NEW, _CORRUPT):
                if self._may_hold(name, scope):
                    self._files.unlink(name)
        except OSError as error:
            left = f"{self._folder}/*{_SUFFIX}*"
            raise CacheError(f"what is forgotten is still in {left}, which cannot be deleted: {error}") from error

    def _may_hold(self, name: str, scope: Scope) -> bool:
        if not name.endswith(_SUFFIX):
            return True
        try:
            with self._files.open(name) as file:
                return read_segment(file, name.removesuffix(_SUFFIX)).covers(scope)
        except (OSError, CacheFormatError):
            return True

    def _named(self, *endings: str) -> list[str]:
        return [name for name in self._files.names() if name.endswith(endings)]

    def withdraw(self, unwanted: Callable[[Segment], bool]) -> None:
        """Delete the segments that are `unwanted`. One that cannot be read stays: `load` sets it aside. Raises what
        `unwanted` raises, and `OSError`.
        """
        for name in self._named(_SUFFIX):
            key, segment = name.removesuffix(_SUFFIX), None
            with contextlib.suppress(OSError, CacheFormatError), self._files.open(name) as file:
                segment = read_segment(file, key)
            if segment is not None and unwanted(segment):
                self._known = None
                self._files.unlink(name)


class NoSegmentFolder(SegmentFolder):
    """The segment folder of a database server: there are no files, and each start rebuilds the index."""

    kept = False

    def __init__(self) -> None:
        super().__init__(Path(os.devnull))

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        yield

    def _named(self, *endings: str) -> list[str]:
        return []
