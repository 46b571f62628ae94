"""Keeps one cache's memory and its store in step: loads at the start, follows other processes, saves segments."""

from __future__ import annotations

import contextlib
import logging
import time

from agentspec.cache.deleter import Deleter
from agentspec.cache.partition import Partition
from agentspec.cache.pool import BYTES_PER_TOKEN, CachePool
from agentspec.cache.storage.segment_file import Coverage, Segment, segment_of
from agentspec.cache.storage.segment_folder import LoadedSegment
from agentspec.cache.storage.sequence_store import SequenceStore
from agentspec.errors import CacheError, CacheLockedError

_log = logging.getLogger(__name__)

_BYTES_PER_SEQUENCE = 512  # least bytes that an index takes for a sequence besides its tokens
_GROWN = 1 << 16  # a running process rewrites a segment that lacks so many tokens,
_GROWN_SHARE = 1 / 4  # if they are at least this share of the namespace's tokens
_CLOSING = 1 << 14  # the same for a closing process: fewer tokens are quickly read from the database
_CLOSING_SHARE = 1 / 128
_PAUSE = 60.0  # seconds between two attempts to save a namespace's segment


class StoreSync:
    """Moves sequences between a cache's pool and its store. The store's writer saves segments; all processes map them.

    `process` is the upper half of the sequence numbers that this process assigns.
    """

    def __init__(self, pool: CachePool, store: SequenceStore, deleter: Deleter, process: int) -> None:
        self._pool = pool
        self._store = store
        self._segments = store.segments
        self._deleter = deleter
        self._process = process
        self._started = False
        self._saved: dict[str, int] = {}  # Partition.added when the segment on disk was saved, by namespace key
        self._tried: dict[str, float] = {}

    @property
    def segment_error(self) -> str | None:
        """Why a segment could not be written or used."""
        return self._segments.error

    def disk_bytes(self) -> int:
        return self._store.disk_bytes() + self._segments.total_bytes()

    # Reading.

    def start(self) -> None:
        """Map the segments, then load the newest sequences that the segments lack, as many as fit."""
        self._deleter.expire()
        self._pool.replace_learned(self._store.learned())
        if self._store.mode == "writer":
            self._segments.sweep()
        beyond = self._load()
        self._pool.ingest(self._store.newest(max(0, self._pool.free_bytes()) // BYTES_PER_TOKEN, beyond))
        with contextlib.suppress(CacheError):  # the maintenance thread tries again, and reports it
            self._store.secure_erase()
        self._started = True

    def _load(self) -> dict[str, int]:
        """Map the segments; returns for each such namespace (by key) the last row that need not be read again."""
        beyond = {}
        for key in self._segments.namespaces():
            if loaded := self._segments.load(key, self._wanted):
                complete = self._adopt(loaded)
                if complete or self._pool.free_bytes() < self._pool.limit / 2:
                    beyond[key] = loaded.segment.coverage.row
        return beyond

    def _wanted(self, segment: Segment) -> bool:
        """Whether a segment fits into memory. A segment that holds deleted sequences is deleted and not wanted.

        Such a segment is left where a process was killed between logging a deletion and deleting the segment.
        """
        if any(segment.covers(scope) for scope in self._store.deletions_since(segment.coverage.deletion)):
            self._segments.delete(segment.namespace.key)
            return False
        return segment.index_bytes + _BYTES_PER_SEQUENCE * len(segment.meta) <= self._pool.free_bytes()

    def _adopt(self, loaded: LoadedSegment) -> bool:
        """Use a segment, less the sequences deleted from the store. Returns whether it has all rows that it covers."""
        segment, cover = loaded.segment, loaded.segment.coverage
        meta = dict(zip(loaded.sequences, segment.meta, strict=True))
        partition = self._pool.partition(segment.namespace)
        partition.adopt(loaded.index, meta)
        self._saved[segment.namespace.key] = partition.added
        if self._store.extent(segment.namespace, until=cover.row) != (cover.rows, cover.newest):
            self._pool.forget(partition, meta.keys() - self._store.numbers(segment.namespace, until=cover.row))
            if partition.is_empty:
                self._segments.delete(segment.namespace.key)
        return len(meta) == cover.rows

    def follow(self) -> None:
        """Load sequences that other processes wrote since the last call, and stay the writer. Raises `CacheError`."""
        if self._store.renew_lease():
            _log.info("now the writer of %s: the last one has ended", self._store.name)
            self._segments.sweep()
            self._deleter.expire_soon()
        with self._deleter.following:
            self._pool.ingest(self._store.poll(self._process))

    def _catch_up(self) -> None:
        """Apply all sequences and deletions that other processes have written."""
        with self._deleter.following:
            self.follow()
            self._deleter.apply_deletions()

    # Writing.

    def flush(self) -> None:
        """Wait until the outputs closed so far are in the database. Raises `CacheError` if they cannot be written."""
        self.report_usage()
        self._store.flush()

    def report_usage(self) -> None:
        """Give the store the hits of sequences and the drafters' learned states."""
        with self._deleter.following:
            partitions = self._pool.partitions()
            self._store.put_usage(
                [hits for partition in partitions for hits in partition.fresh_hits()],
                {partition.namespace.key: partition.learned() for partition in partitions},
            )

    def maintain(self) -> None:
        """Called periodically: enforce the disk budgets, whichever process wrote, and save segments that lack much."""
        self._store.enforce_budget()
        for partition in self._pool.partitions():
            paused = time.monotonic() - self._tried.get(partition.namespace.key, -_PAUSE) >= _PAUSE
            if paused and self._lacks(partition, _GROWN, _GROWN_SHARE):
                self._try_to_save(partition)

    def compact(self) -> int:
        """Rewrite all segments and the database; returns the bytes on disk.

        Raises `CacheLockedError` where another process is the writer, `CacheError` when rewriting fails.
        """
        if self._store.mode != "writer":
            raise CacheLockedError("another process is the writer of this cache; compact there, or when it has ended")
        self.flush()
        self._catch_up()
        for partition in self._pool.partitions() if self._segments.kept else ():
            try:
                self._save(partition)
            except OSError as error:
                raise CacheError(f"a segment cannot be written: {error}") from error
        self._store.compact()
        return self.disk_bytes()

    def close(self) -> None:
        """Save the segments that lack so many tokens that the next start would be slow."""
        lacking = [one for one in self._pool.partitions() if self._lacks(one, _CLOSING, _CLOSING_SHARE)]
        if not self._started or not lacking:
            return
        with contextlib.suppress(CacheError):  # sequences not in the database are left out of the segments
            self._store.flush()
        for partition in lacking:
            self._try_to_save(partition)

    def _lacks(self, partition: Partition, least: int, share: float) -> bool:
        """Whether at least `least` tokens, and at least `share` of all, are in no segment."""
        if self._store.mode != "writer" or not self._segments.kept:
            return False
        tokens, key = partition.shared.token_count, partition.namespace.key
        lacking = min(tokens, partition.added - self._saved.get(key, 0))
        if lacking < tokens and key not in self._segments.namespaces():  # a deletion removed the segment
            lacking = tokens
        return lacking >= max(least, share * tokens)

    def _try_to_save(self, partition: Partition) -> None:
        self._tried[partition.namespace.key] = time.monotonic()
        try:
            self._save(partition)
        except Exception as error:  # a segment can be built again: nothing that fails here may keep the cache open
            self._segments.failed("a segment cannot be written", error)

    def _save(self, partition: Partition) -> None:
        """Write the segment of a namespace. The lock keeps deletions out, so that it holds no deleted sequence."""
        with self._segments.writing():
            with self._deleter.following:
                self._catch_up()
                row, deletion, added = self._store.last_id, self._store.last_deletion, partition.added
                numbers = self._store.numbers(partition.namespace, until=row)
                _, newest = self._store.extent(partition.namespace, until=row)
            frozen, known = partition.freeze(numbers)
            segment = segment_of(partition.namespace, Coverage(row, len(numbers), newest, deletion), frozen, known)
            if segment.meta and self._fits(segment):
                self._segments.save(segment, frozen)
                self._saved[partition.namespace.key] = added

    def _fits(self, segment: Segment) -> bool:
        limit = self._store.disk_limit
        others = self._segments.total_bytes() - self._segments.size(segment.namespace.key)
        return limit is None or self._store.disk_bytes() + others + segment.index_bytes <= limit
