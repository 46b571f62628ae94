"""Applies a deletion to memory and store, so that no deleted sequence comes back from the other of the two."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from agentspec.cache.deletion import Scope, Selection, pause_between_looks, select
from agentspec.cache.partition import Partition
from agentspec.cache.request import CachePool
from agentspec.cache.tokens import EMPTY, SequenceRecord, Tokens
from agentspec.telemetry.safe_errors import error_location

if TYPE_CHECKING:
    from agentspec.cache.storage.sequence_store import SequenceStore

_log = logging.getLogger(__name__)

_SELDOM, _OFTEN = 3600.0, 1.0  # seconds between two looks for old sequences, at most, and where one failed


class Deleter:
    """Deletes from the pool and the store of one cache. Thread-safe.

    Threads hold `following` while they load sequences from the store, apply deletions or prepare a segment; they take
    it before the locks of the pool.
    """

    def __init__(self, pool: CachePool, store: SequenceStore | None, retention: float | None) -> None:
        self.following = threading.RLock()
        self._pool = pool
        self._store = store
        self._retention = retention
        self._expires_at = time.monotonic()
        self._unapplied: dict[int, Scope] = {}  # deletions known of, by number
        self._listeners: list[Callable[[Scope], None]] = []

    def listen(self, listener: Callable[[Scope], None]) -> Callable[[], None]:
        """Have `listener` called with the scope of every deletion, here or in another process that uses the database,
        once it is applied to memory and before `forget` returns. It must not wait. Returns what ends that.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def forget(self, selection: Selection, *, expiring: bool = False) -> int:
        """Delete a selection; returns how many sequences were deleted.

        `expiring`: write to the database only if a sequence matches. Raises `CacheError` where the store cannot be
        changed; no sequence is deleted then.
        """
        self._forget_sessions(selection.scope)
        if self._store is None:
            count = self._forget_in_memory(selection)
            if count or not expiring:
                self._notify(selection.scope)
            return count
        return self._forget_stored(self._store, selection, expiring)

    def expired(self) -> Scope | None:
        """What is too old here; the database may keep it longer."""
        return None if self._retention is None else select(older_than=self._retention).scope

    def unexpired(self, records: Iterable[SequenceRecord]) -> Iterator[SequenceRecord]:
        """Those of the records that are not."""
        expired = self.expired()
        return (one for one in records if not (expired and expired.covers(None, one.created_at)))

    def expire(self) -> None:
        """Delete what is older than the retention from memory, and from the store unless this process is a follower."""
        if self._retention is None:
            self._expires_at = math.inf
            return
        self._expires_at = time.monotonic() + _OFTEN  # again soon if it fails
        selection = select(older_than=self._retention)
        if self._store:
            self._expire_in_memory(selection.scope)
        if not (self._store and self._store.mode == "follower"):
            self.forget(selection, expiring=True)
        self._expires_at = time.monotonic() + pause_between_looks(self._retention, _SELDOM)

    def _expire_in_memory(self, scope: Scope) -> None:
        """Of what the store never got, or cannot be asked about, no deletion in the store would tell."""
        self._forget_sessions(scope)
        covered = [(partition, numbers) for partition, numbers in self._covered(scope) if numbers]
        for partition, numbers in covered:
            self._forget(partition, numbers)
        if covered:
            self._notify(scope)

    def expire_soon(self) -> None:
        """Let the next `maintain` delete old sequences: this process has become the writer."""
        self._expires_at = time.monotonic()

    def maintain(self) -> None:
        """Called periodically: apply other processes' deletions, finish a pending erasure, expire old sequences."""
        try:
            if self._store:
                self.apply_deletions()
                self._store.erasure.finish()
        finally:  # nothing outlives its term because something else fails
            if time.monotonic() >= self._expires_at:
                self.expire()

    def apply_deletions(self) -> None:
        """Delete from memory the sequences that this process or another deleted from the store."""
        assert self._store is not None
        with self.following:
            # One that the database kept from being applied whole is not pending any more.
            self._unapplied.update(self._store.pending_deletions())
            while self._unapplied:
                number = min(self._unapplied)
                scope = self._unapplied[number]
                self._forget_sessions(scope)
                covered = self._covered(scope)
                self._store.finish_deletion(number, scope)
                for partition, numbers in covered:
                    kept = {record.sequence for record in self._store.unwritten(partition.namespace)}
                    kept |= self._store.stored(numbers)
                    self._forget(partition, [one for one in numbers if one not in kept])
                self._unapplied.pop(number)
                self._notify(scope)

    def _notify(self, scope: Scope) -> None:
        for listener in [*self._listeners]:
            try:
                listener(scope)
            except Exception as error:  # what others keep must not hold up the deletion here
                _log.error("what was derived of deleted text may be left: %s", error_location(error))

    def _forget_stored(self, store: SequenceStore, selection: Selection, expiring: bool) -> int:
        with store.segments.writing():
            if expiring and not store.holds(selection):
                return 0
            # First: a process that is killed in between leaves no segment with what is forgotten.
            store.segments.invalidate(selection.scope)
            count = store.forget(selection, rewrite=not expiring)
            self._pool.count(forgotten=count)
        self.apply_deletions()
        store.erasure.finish(now=True)
        if store.erasure.is_pending and count:
            _log.warning(
                "deleted from %s, but bytes may be left in its files until others cease to read them", store.name
            )
        return count

    def _forget_in_memory(self, selection: Selection) -> int:
        partitions = self._pool.namespaces.partitions(selection.scope)
        chosen = [(partition, _selected(partition, selection)) for partition in partitions]
        for partition, numbers in chosen:
            self._forget(partition, numbers)
        count = sum(len(numbers) for _, numbers in chosen)
        self._pool.count(forgotten=count)
        return count

    def _forget_sessions(self, scope: Scope) -> None:
        """Delete the sessions in scope, also those that requests hold, whose outputs are not shared any more; a held
        session counts as used now. No text is searched for: to begin again from the next prompt costs little.
        """
        for partition in self._pool.namespaces.partitions(scope):
            with partition.lock:
                for session in list(partition.sessions):
                    if scope.covers(session.label, time.time() if session.busy else session.used_at):
                        session.forgotten = True
                        partition.sessions.forget(session)
                self._pool.namespaces.book(partition)

    def _covered(self, scope: Scope) -> list[tuple[Partition, list[int]]]:
        """The sequences in scope by partition; each is in the store, or waits to be written."""
        return [(partition, covered(partition, scope)) for partition in self._pool.namespaces.partitions(scope)]

    def _forget(self, partition: Partition, sequences: Iterable[int]) -> None:
        """Delete sequences; a partition that is empty then is dropped with what it learned."""
        with partition.lock:
            forget_sequences(partition, sequences)
            if partition.is_empty:
                self._pool.namespaces.retire(partition)
            else:
                self._pool.namespaces.book(partition)


def covered(partition: Partition, scope: Scope) -> list[int]:
    """The cached sequences that lie in `scope`. The caller has checked that it concerns this namespace."""
    known = partition.known()
    named = replace(scope, before=None)
    sessions = {session for session in {meta.session for _, meta in known} if named.covers(session, 0.0)}  # hashes
    aged = replace(scope, session=None)
    return [number for number, meta in known if meta.session in sessions and aged.covers(None, meta.created_at)]


def forget_sequences(partition: Partition, sequences: Iterable[int]) -> None:
    """Delete sequences, and from the learned state the end tokens that no other sequence has."""
    partition.remove(list(sequences))
    known = {meta.end for _, meta in partition.known()}
    partition.drafter.keep_ends(np.array(sorted(known), dtype=np.int32))
    partition.learned = b""  # the deletion dropped what was stored


def _selected(partition: Partition, selection: Selection) -> list[int]:
    numbers = covered(partition, selection.scope)
    return [one for one in numbers if selection.holds(_text_of(partition, one))] if selection.searched else numbers


def _text_of(partition: Partition, sequence: int) -> Tokens:
    """A sequence after its context tokens; empty if it was evicted meanwhile."""
    with contextlib.suppress(KeyError):
        return np.concatenate((partition.shared.prefix(sequence), partition.shared.tokens(sequence)))
    return EMPTY
