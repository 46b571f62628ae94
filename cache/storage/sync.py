"""Between the memory of one cache and its folder: what is read at the start, followed, and saved as segments."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from agentspec.cache.deleter import Forgetter
from agentspec.cache.partition import Space
from agentspec.cache.storage.record import Row
from agentspec.cache.storage.segment_file import Coverage, Segment, segment_of
from agentspec.cache.storage.segment_folder import Loaded
from agentspec.cache.storage.sequence_store import Store
from agentspec.errors import CacheError, CacheLockedError

if TYPE_CHECKING:
    from agentspec.cache.suffix_cache import SuffixCache

_BYTES_PER_TOKEN = 32  # most that an index holds for a token, with room to merge
_BYTES_PER_SEQUENCE = 512  # what it holds beside, at least
_GROWN = 1 << 16  # tokens missing in a segment for which a running process writes it again,
_GROWN_SHARE = 1 / 4  # if they are that much of it
_CLOSING = 1 << 14  # the same for one that closes: so many are quickly read from the database
_CLOSING_SHARE = 1 / 128
_PAUSE = 60.0  # seconds between two segments of a namespace


class Persistence:
    """Of a cache with a folder. The writer of the folder saves segments, everybody maps them."""

    def __init__(self, cache: SuffixCache, store: Store, forgetter: Forgetter, origin: int) -> None:
        self._cache = cache
        self._store = store
        self._segments = store.segments
        self._forgetter = forgetter
        self._origin = origin
        self._started = False
        self._saved: dict[str, int] = {}  # Space.added of what the segments on disk hold, by namespace key
        self._tried: dict[str, float] = {}

    @property
    def segment_error(self) -> str | None:
        """Why a segment could not be written or used."""
        return self._segments.error

    def disk_bytes(self) -> int:
        return self._store.disk_bytes() + self._segments.total_bytes()

    # Reading.

    def start(self, learned: dict[str, bytes]) -> None:
        """Map the segments, and take in the newest of the rows that they lack and that fit."""
        self._forgetter.expire()
        learned.update(self._store.learned())
        if self._store.mode == "writer":
            self._segments.sweep()
        beyond = self._load()
        self.take_in(self._store.newest(max(0, self._room()) // _BYTES_PER_TOKEN, beyond))
        with contextlib.suppress(CacheError):  # the keeper tries again, and tells
            self._store.scrub()
        self._started = True

    def _room(self) -> int:
        """Bytes of memory that the budget has left; negative where it is overdrawn."""
        return self._cache._budget.limit - self._cache._budget.taken()

    def _load(self) -> dict[str, int]:
        """The namespaces (by key) of which only rows after the one given are missing in memory."""
        beyond = {}
        for key in self._segments.namespaces():
            if loaded := self._segments.load(key, self._wanted):
                complete = self._adopt(loaded)
                if complete or self._cache._budget.taken() > self._cache._budget.limit / 2:
                    beyond[key] = loaded.segment.coverage.row
        return beyond

    def _wanted(self, segment: Segment) -> bool:
        """Whether a segment fits, and holds nothing forgotten by a process that was killed before it deleted it."""
        if any(segment.covers(scope) for scope in self._store.forgotten_since(segment.coverage.deletion)):
            self._segments.delete(segment.namespace.key)
            return False
        return segment.index_bytes + _BYTES_PER_SEQUENCE * len(segment.origins) <= self._room()

    def _adopt(self, loaded: Loaded) -> bool:
        """Use a segment but for what is not stored any more. Returns whether it has all rows that it stands for."""
        segment, cover = loaded.segment, loaded.segment.coverage
        origins = dict(zip(loaded.sequences, segment.origins, strict=True))
        with self._cache._lock:
            space = self._cache._space(segment.namespace)
        space.adopt(loaded.index, origins)
        self._saved[segment.namespace.key] = space.added
        if self._store.extent(segment.namespace, until=cover.row) != (cover.rows, cover.newest):
            space.forget(origins.keys() - self._store.numbers(segment.namespace, until=cover.row))
            if not space.shared.sequence_count:
                self._segments.delete(segment.namespace.key)
                del self._cache._spaces[segment.namespace]
        return len(origins) == cover.rows

    def follow(self) -> None:
        """Take in what other processes wrote since the last look, and stay the writer. Raises `CacheError`."""
        self._store.hold()
        with self._forgetter.following:
            self.take_in(self._store.news(self._origin))

    def _catch_up(self) -> None:
        """Follow to the end."""
        with self._forgetter.following:
            self.follow()
            self._forgetter.settle()

    def take_in(self, rows: Iterable[Row]) -> None:
        for row in rows:
            with self._cache._lock:
                space = self._cache._space(row.namespace)
            if not space.holds(row.sequence):
                self._cache._add_to(space, row)
        self._cache._enforce_budget()

    # Writing.

    def flush(self) -> None:
        """Return when everything closed so far is in the database. Raises `CacheError` when it cannot be written."""
        self.report_usage()
        self._store.flush()

    def report_usage(self) -> None:
        """Hand the store what changes without a request closing: hits, and what was learned about drafting."""
        with self._forgetter.following:
            spaces = self._spaces()
            self._store.put_usage(
                [hits for space in spaces for hits in space.fresh_hits()],
                {space.namespace.key: space.learned() for space in spaces},
            )

    def keep(self) -> None:
        """Keep the budgets, whoever wrote, and write the segments that lack too much, now and then."""
        self._store.make_room()
        for space in self._spaces():
            paused = time.monotonic() - self._tried.get(space.namespace.key, -_PAUSE) >= _PAUSE
            if paused and self._lacks(space, _GROWN, _GROWN_SHARE):
                self._try_to_save(space)

    def compact(self) -> int:
        """Write all segments and the database anew; returns the bytes on disk.

        Raises `CacheLockedError` where another process is the writer, `CacheError` when it cannot be done.
        """
        if self._store.mode != "writer":
            raise CacheLockedError("another process is the writer of this cache; compact there, or when it has ended")
        self.flush()
        self._catch_up()
        for space in self._spaces() if self._segments.kept else ():
            try:
                self._save(space)
            except OSError as error:
                raise CacheError(f"a segment cannot be written: {error}") from error
        self._store.compact()
        return self.disk_bytes()

    def close(self) -> None:
        """Write the segments without which the next start would be slow."""
        lacking = [space for space in self._spaces() if self._lacks(space, _CLOSING, _CLOSING_SHARE)]
        if not self._started or not lacking:
            return
        with contextlib.suppress(CacheError):  # what is not in the database is in no segment
            self._store.flush()
        for space in lacking:
            self._try_to_save(space)

    def _spaces(self) -> list[Space]:
        with self._cache._lock:
            return list(self._cache._spaces.values())

    def _lacks(self, space: Space, least: int, share: float) -> bool:
        """Whether at least so many tokens, and that share of all, are in no segment."""
        if self._store.mode != "writer" or not self._segments.kept:
            return False
        tokens, key = space.shared.token_count, space.namespace.key
        lacking = min(tokens, space.added - self._saved.get(key, 0))
        if lacking < tokens and key not in self._segments.namespaces():  # deleted, with what was forgotten
            lacking = tokens
        return lacking >= max(least, share * tokens)

    def _try_to_save(self, space: Space) -> None:
        self._tried[space.namespace.key] = time.monotonic()
        try:
            self._save(space)
        except (OSError, MemoryError, CacheError) as error:
            self._segments.failed("a segment cannot be written", error)

    def _save(self, space: Space) -> None:
        """Write the segment of a namespace. Nobody forgets meanwhile, so that nothing forgotten is in it."""
        with self._segments.writing():
            with self._forgetter.following:
                self._catch_up()
                row, deletion, added = self._store.last_id, self._store.settled, space.added
                numbers = self._store.numbers(space.namespace, until=row)
                _, newest = self._store.extent(space.namespace, until=row)
            frozen, known = space.freeze(numbers)
            segment = segment_of(space.namespace, Coverage(row, len(numbers), newest, deletion), frozen, known)
            if segment.origins and self._fits(segment):
                self._segments.save(segment, frozen)
                self._saved[space.namespace.key] = added

    def _fits(self, segment: Segment) -> bool:
        limit = self._store.disk_limit
        others = self._segments.total_bytes() - self._segments.size(segment.namespace.key)
        return limit is None or self._store.disk_bytes() + others + segment.index_bytes <= limit
