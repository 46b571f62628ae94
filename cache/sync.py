"""Keeps one cache's memory and its store in step: loads at the start, follows other processes, saves segments."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from agentspec.cache.deleter import Deleter, covered, forget_sequences
from agentspec.cache.namespaces import AT_ONCE
from agentspec.cache.partition import Partition
from agentspec.cache.request import CachePool
from agentspec.cache.storage.segments import Coverage, Segment, segment_of
from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.cache.tokens import SequenceRecord
from agentspec.errors import CacheError, CacheFormatError, CacheLockedError, CacheUnavailableError
from agentspec.types import Namespace

_log = logging.getLogger(__name__)

_BYTES_PER_TOKEN = 12  # upper bounds of what outputs take in memory, merges included:
_BYTES_PER_SEQUENCE = 1024  # for each besides its tokens
_RESERVED = 1 << 16  # bytes that are reserved for rows at least
_GROWN = 1 << 16  # a running process rewrites a segment that lacks so many tokens,
_GROWN_SHARE = 1 / 4  # if they are at least this share of the namespace's tokens
_CLOSING = 1 << 14  # the same for a closing process: fewer tokens are quickly read from the database
_CLOSING_SHARE = 1 / 128
_RETRY = 1.0  # seconds until loading is tried again after a failure
_PAUSE = 60.0  # seconds between two attempts to save a namespace's segment


class StoreSync:
    """Moves sequences between a cache's pool and its store. The writer saves segments, and all processes map them.

    A namespace is loaded when a request uses it.
    """

    def __init__(self, pool: CachePool, store: SequenceStore, deleter: Deleter) -> None:
        self._pool = pool
        self._store = store
        self._segments = store.segments
        self._deleter = deleter
        self._started = False
        self._tried: dict[Partition, float] = {}  # segments that were to be saved within the last `_PAUSE`, and when
        self._load_at = 0.0  # when loading is tried again after the database did not answer
        self._swept = True

    def disk_bytes(self) -> int:
        return self._store.disk_bytes() + self._segments.total_bytes()

    def figures(self) -> dict[str, Any]:
        store, segments = self._store, self._segments
        return {
            "disk_bytes": self.disk_bytes(),
            "mode": store.mode,
            "store_error": store.writer.error,
            "segment_error": segments.error,
            "segments_skipped": segments.skipped,
            "unwritten": store.writer.dropped,
            "damaged": store.damaged,
            "unread": store.unread,
            "behind": store.behind,
            "erasure_pending": store.erasure.is_pending,
        }

    # Reading.

    def start(self) -> None:
        """List what the store holds, and load the namespaces written last; others are loaded when they are used."""
        self._deleter.expire()
        if self._store.mode == "writer":
            self._segments.sweep()
        self._store.position()
        saved = self._segments.namespaces()  # before the rows: those of a segment are committed before it is written
        stored, newest = self._store.namespaces(AT_ONCE)
        for key in set(saved) - stored:
            self._segments.delete(key)
        self._pool.namespaces.source = self
        for namespace in newest:
            if self._pool.namespaces.preload(namespace) is None:
                break
        with contextlib.suppress(CacheError):  # the maintenance thread tries again, and reports it
            self._store.erasure.finish()
        self._started = True

    def can_reload(self) -> bool:
        """Whether outputs are being written, so that a namespace that leaves memory is found again."""
        return self._store.writer.error is None

    def load(self, partition: Partition, room: int, reserve: Callable[[int], int]) -> None:
        """Fill a partition that is not loaded, under its lock, with at most `room` bytes, of which it reserves some.

        Where the database does not answer, the namespace goes on without its past, and is loaded later.
        """
        if time.monotonic() < max(self._load_at, partition.load_at):
            return
        try:
            self._fill(partition, room, reserve)
            partition.loaded = True
        except CacheError as error:
            later = time.monotonic() + _RETRY
            if isinstance(error, CacheUnavailableError):
                self._load_at = later
            else:  # the fault may be this one's: others need not wait
                partition.load_at = later
            _log.warning("a namespace cannot be loaded: %s", error)

    def _fill(self, partition: Partition, room: int, reserve: Callable[[int], int]) -> None:
        namespace, row = partition.namespace, 0
        if not partition.shared.sequence_count:
            self._recall(partition)
        if self._segments.exists and not partition.shared.sequence_count:
            loaded = self._segments.load(namespace.key, lambda segment: self._wanted(segment, room, reserve))
            if loaded:
                segment, index, numbers = loaded
                partition.adopt(index, dict(zip(numbers, segment.meta, strict=True)))
                partition.saved = partition.added
                if len(numbers) == segment.coverage.rows or partition.memory_bytes() > room // 2:
                    row = segment.coverage.row
        room = max(0, room - partition.memory_bytes())
        unwritten = self._store.unwritten(namespace)  # from before it left memory
        for record in (*self._newest(namespace, row, room, reserve), *unwritten):
            if not partition.holds(record.sequence):
                partition.add(record)
        if (expired := self._deleter.expired()) and (old := covered(partition, expired)):
            forget_sequences(partition, old)
        partition.merge(lambda: False)  # its size is looked at next

    def _recall(self, partition: Partition) -> None:
        """Go on from what was learned when a process last closed the cache."""
        try:
            if (state := self._store.learned(partition.namespace)) is not None:
                partition.drafter.restore(state)
                partition.learned = state.tobytes()
        except CacheFormatError as error:
            _log.warning("what was learned of a namespace is not used, and is learned anew: %s", error)

    def _newest(self, namespace: Namespace, row: int, room: int, reserve: Callable[[int], int]) -> list[SequenceRecord]:
        """The newest sequences of a namespace, in rows after `row`, that take at most `room` bytes, oldest first."""
        found: list[SequenceRecord] = []
        needed, free = 0, min(room, reserve(0))
        for record in self._store.newest(namespace, row):
            needed += _BYTES_PER_SEQUENCE + _BYTES_PER_TOKEN * len(record.tokens)
            if free < needed <= room:  # others give what is known to be needed, or a little more
                free = min(room, reserve(min(room, max(2 * needed, _RESERVED))))
            if needed > free:
                break
            found.append(record)
        return found[::-1]

    def _wanted(self, segment: Segment, room: int, reserve: Callable[[int], int]) -> bool:
        """Whether a segment is as the database is, fits into `room` bytes, and they are free.

        One that holds rows which the database does not is deleted, and the namespace is read from the database: they
        may be forgotten, and the segment put back, say from a backup.
        """
        cover = segment.coverage
        if self._store.extent(segment.namespace, until=cover.row) != (cover.rows, cover.newest):
            self._segments.delete(segment.namespace.key)
            return False
        size = segment.index_bytes + _BYTES_PER_SEQUENCE * len(segment.meta)
        return size <= room and reserve(size) >= size

    def follow(self) -> None:
        """Load sequences that other processes wrote since the last call, and stay the writer. Raises `CacheError`."""
        if self._store.renew_lease():
            _log.info("now the writer of %s: the last one has ended", self._store.name)
            self._swept = False
            self._deleter.expire_soon()
        self._follow_on()
        until = self._store.last_id + self._store.unread
        while self._store.last_id < until:
            self._follow_on()

    def _follow_on(self) -> None:
        """Load the next few: between two calls others, such as `flush`, take the lock."""
        with self._deleter.following:
            self._ingest(self._deleter.unexpired(self._store.fresh()))

    def _ingest(self, records: Iterable[SequenceRecord]) -> None:
        """Add sequences that this process does not hold yet.

        Namespaces that are not in memory are left out, unless they are few: what is there is loaded with them later.
        """
        grown, namespaces = set(), self._pool.namespaces
        for record in records:
            if partition := namespaces.loaded(record.namespace) or namespaces.preload(record.namespace):
                with partition.lock:
                    if not partition.retired and not partition.holds(record.sequence):
                        partition.add(record)
                        grown.add(partition)
        for partition in grown:
            namespaces.settle(partition)

    def _catch_up(self) -> None:
        """Apply all sequences and deletions that other processes have written."""
        self.follow()
        with self._deleter.following:
            self.follow()
            self._deleter.apply_deletions()

    # Writing.

    def flush(self) -> None:
        """Wait until the outputs closed so far are in the database. Raises `CacheError` if they cannot be written."""
        self._store.writer.flush()

    def maintain(self) -> None:
        """Called periodically: enforce the disk budgets, save segments that lack much.

        Looks at those namespaces only that were used since the last call; a process that becomes the writer at all.
        """
        self._store.enforce_budget()
        self._save_segments()

    def _save_segments(self) -> None:
        if not self._writes:
            return
        if not self._swept:
            self._swept = True
            self._segments.sweep()
        ended = [one for one, tried in self._tried.items() if time.monotonic() - tried >= _PAUSE]
        for partition in ended:
            del self._tried[partition]
        for partition in dict.fromkeys([*ended, *self._pool.namespaces.take_used()]):
            if partition not in self._tried and self._lacks(partition, _GROWN, _GROWN_SHARE):
                self._try_to_save(partition)

    def compact(self) -> int:
        """Rewrite all segments and the database; returns the bytes on disk.

        Raises `CacheLockedError` where another process is the writer, `CacheError` when rewriting fails.
        """
        if self._store.mode != "writer":
            raise CacheLockedError("another process is the writer of this cache; compact there, or when it has ended")
        self.flush()
        self._catch_up()
        for partition in self._pool.namespaces.partitions() if self._segments.exists else ():
            try:
                self._save(partition)
            except OSError as error:
                raise CacheError(f"a segment cannot be written: {error}") from error
        self._store.compact()
        return self.disk_bytes()

    def close(self) -> None:
        """Save what was learned, and the segments that lack so many tokens that the next start would be slow."""
        if not self._started:
            return
        partitions = [one for one in self._pool.namespaces.partitions() if one.loaded]
        for partition in partitions:
            if self._lacks(partition, _CLOSING, _CLOSING_SHARE):
                self._try_to_save(partition)
        try:
            self._save_learned(partitions)
        except CacheError as error:
            _log.warning("what was learned is not saved, and is learned anew: %s", error)

    def _save_learned(self, partitions: list[Partition]) -> None:
        """Save what changed since it was loaded. Of several processes that do, the last one's is kept."""
        changed = [one for one in partitions if one.drafter.state().tobytes() != one.learned]
        if changed and self.can_reload():
            self.flush()  # of namespaces without outputs nothing is kept
            self._deleter.apply_deletions()  # which may leave out tokens
            self._store.save_learned({one.namespace.key: one.drafter.state() for one in changed})

    @property
    def _writes(self) -> bool:
        return self._store.mode == "writer" and self._segments.exists

    def _lacks(self, partition: Partition, least: int, share: float) -> bool:
        """Whether at least `least` tokens, and at least `share` of all, are in no segment."""
        tokens = partition.shared.token_count
        if tokens < least or partition.retired or not self._writes:
            return False
        lacking = min(tokens, partition.added - partition.saved)
        if lacking < tokens and not self._segments.size(partition.namespace.key):  # a deletion removed the segment
            lacking = tokens
        return lacking >= max(least, share * tokens)

    def _try_to_save(self, partition: Partition) -> None:
        self._tried[partition] = time.monotonic()
        with contextlib.suppress(CacheError):  # sequences not in the database are left out of the segments
            self._store.writer.flush()
        try:
            self._save(partition)
        except Exception as error:  # a segment can be built again: nothing that fails here may keep the cache open
            self._segments.failed("a segment cannot be written", error)

    def _save(self, partition: Partition) -> None:
        """Write the segment of a namespace. The lock keeps deletions out, so that it holds no deleted sequence."""
        with self._segments.writing():
            with self._deleter.following:
                self._catch_up()
                row, added = self._store.last_id, partition.added
                numbers = self._store.numbers(partition.namespace, until=row)
                _, newest = self._store.extent(partition.namespace, until=row)
            known = dict(partition.known())
            held = [number for number in numbers if number in known]
            parts = partition.shared.freeze(np.array(held, dtype=np.int64))
            segment = segment_of(partition.namespace, Coverage(row, len(numbers), newest), parts, known)
            if segment.meta and self._fits(segment):
                self._segments.save(segment, parts)
                partition.saved = added

    def _fits(self, segment: Segment) -> bool:
        limit = self._store.disk_limit
        if limit is None:
            return True
        others = self._segments.known_bytes() - self._segments.size(segment.namespace.key)
        return self._store.disk_bytes() + others + segment.index_bytes <= limit
