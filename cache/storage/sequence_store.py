"""The sequences in a database: a background thread writes them; they are read at open and as other processes add."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np
import sqlalchemy as sa

from agentspec.cache.deletion import Scope, Selection
from agentspec.cache.storage import codec, deletion_log
from agentspec.cache.storage.batch_writer import BatchWriter
from agentspec.cache.storage.database import FAILURES, Database, PendingErasure, reason, write_rows
from agentspec.cache.storage.disk_budget import DiskBudget
from agentspec.cache.storage.opening import acquire_writer, opening, prepare, replace_damaged
from agentspec.cache.storage.reader import SequenceReader
from agentspec.cache.storage.schema import damaged, sequences
from agentspec.cache.storage.segments import SegmentFolder
from agentspec.cache.tokens import SequenceRecord
from agentspec.errors import CacheDamagedError, CacheError
from agentspec.types import Namespace

_ATTEMPTS = 5  # tries to rewrite the database; each waits some seconds for other processes
_ROOM = 64 << 20  # bytes of outputs that may wait while the database cannot be written
_LINGER = 0.05  # seconds that an output waits for others: a transaction of its own writes ten times its size
_JOB_BYTES = 1024  # of the Python objects around an output
_WAITING = 1 << 20  # tokens that `add_missing` puts before it waits until they are written
_log = logging.getLogger(__name__)


class SequenceStore(SequenceReader):
    """The sequences of one database. Thread-safe but for `poll`. Open it with `SequenceStore.open`.

    Sequences that are put into it get the next of `numbering`, which begin at random: no other process has the same.
    """

    def __init__(self, database: Database, segments: SegmentFolder, budget: DiskBudget) -> None:
        super().__init__(database)
        self.segments = segments
        self._budget = budget
        self.also_forgets: list[Callable[[sa.Connection, Selection], int]] = []  # called in a deletion's transaction
        self._disk_bytes = 0
        self._erasure = PendingErasure(database, pending=database.is_writer)  # a killed process may have left bytes
        self._own: dict[int, Selection] = {}  # this process's deletions that are not applied yet, by number
        self.last_deletion = self._newest_deletion()  # the last one applied here
        first = secrets.randbits(62)
        self._own_numbers, self.numbering = range(first, first + (1 << 32)), count(first)
        # Last: its thread would not end if anything before failed.
        self._writer: BatchWriter[SequenceRecord] = BatchWriter(
            self._commit,
            name="agentspec-cache-writer",
            is_transient=database.is_transient,
            describe=reason,
            size=_size,
            room=_ROOM,
            linger=_LINGER,
        )

    @classmethod
    def open(
        cls,
        target: str | Path,
        *,
        disk_bytes: int | None,
        mode: Literal["auto", "writer", "follower"],
        tenant_disk_bytes: int | None = None,
    ) -> SequenceStore:
        """Open the database at `target`, a folder or an address.

        Raises `CacheLockedError`, `CacheFormatError`, `CacheUnavailableError` if opening may succeed at another time or
        for another user, and `ConfigurationError` if `target` cannot be a database.
        """
        with opening(target) as database:
            acquire_writer(database, mode)
            database.connect()
            segments = SegmentFolder(database.folder)
            if replace_damaged(database):
                segments.clear()
            prepare(database)
            return cls(database, segments, DiskBudget(database, segments, disk_bytes, tenant_disk_bytes))

    @property
    def name(self) -> str:
        """The database, for messages."""
        return self._database.name

    @property
    def folder(self) -> Path | None:
        """The folder of the database's files; None for a database server."""
        return self._database.folder

    @property
    def database(self) -> Database:
        """The database, for what else is kept in it."""
        return self._database

    @property
    def mode(self) -> Literal["writer", "follower"]:
        return "writer" if self._database.is_writer else "follower"

    @property
    def error(self) -> str | None:
        """Why sequences cannot be written now; None if they can."""
        return self._writer.error

    @property
    def dropped(self) -> int:
        """How many writes were dropped."""
        return self._writer.dropped

    @property
    def disk_limit(self) -> int | None:
        """Bytes that database and segments may take together; None: no limit."""
        return self._budget.limit

    def put(self, record: SequenceRecord) -> None:
        """Queue a sequence for writing; `flush` waits until it is durable."""
        self._writer.put(record)

    def add_missing(self, records: Iterable[SequenceRecord]) -> tuple[int, int]:
        """Store the sequences that the store lacks, and wait until they are durable; returns (added, known).

        Each stored sequence with the same namespace, session, tokens and end of the prompt stands for one of `records`:
        those that are added again add nothing, and an output that was generated twice stays in the store twice. Raises
        `CacheError` if the sequences cannot be written.
        """
        there = Counter(map(_identity, self.records()))
        added = known = waiting = 0
        for record in records:
            if there[key := _identity(record)] > 0:
                there[key] -= 1
                known += 1
                continue
            self.put(replace(record, sequence=next(self.numbering)))
            added, waiting = added + 1, waiting + len(record.tokens)
            if waiting > _WAITING:
                self.flush()
                waiting = 0
        self.flush()
        return added, known

    def fresh(self) -> list[SequenceRecord]:
        """The next sequences that other processes have added, as `poll` gives them."""
        return self.poll(self._own_numbers)

    def unwritten(self, namespace: Namespace) -> list[SequenceRecord]:
        """A namespace's sequences that wait to be written. What is read from the database afterwards has the others."""
        if not self._writer.waiting():
            return []
        with self._reading() as connection:  # first: what these cover may be dropped meanwhile
            deletions = deletion_log.since(connection, self.last_deletion)
        waiting, _ = self._allowed(self._writer.waiting(), deletions)
        return [job for job in waiting if job.namespace == namespace]

    def flush(self) -> None:
        """Wait until everything put so far is durable. Raises `CacheError` if it cannot be written."""
        self._writer.flush()

    def renew_lease(self) -> bool:
        """Stay the writer, or succeed one that ended; whether this process has just become it. Called periodically."""
        before = self._database.is_writer
        self._database.renew_lease()
        elected = self._database.is_writer and not before
        if elected:
            self._erasure.mark()
        return elected

    def enforce_budget(self) -> None:
        """Keep the database within its budgets, whichever process wrote to it. Called periodically."""
        self._budget.enforce()

    def examine(self) -> None:
        """Check the whole database. Raises `CacheDamagedError` if something is wrong with its structure."""
        with self._answering():
            if found := self._database.problems():
                raise damaged(self.name, found[0])

    # Deletions.

    def holds(self, selection: Selection) -> bool:
        """Whether a stored sequence matches the selection."""
        with self._reading() as connection:
            return bool(deletion_log.search(connection, selection)[0])

    def forget(self, selection: Selection, *, rewrite: bool) -> int:
        """Delete a selection in one transaction and log the deletion for other processes; returns how many sequences.
        With `rewrite`, the database is then written again without them.

        Sequences in its scope that other processes have not written yet are dropped when they write. They delete from
        their memory by `pending_deletions`. Raises `CacheError` if the deletion fails or the database is damaged, and
        nothing is deleted then.
        """
        if rewrite:
            self.examine()  # a search does not meet all damage, and misses what it hides
        with contextlib.suppress(CacheError):  # `finish_deletion` handles sequences that cannot be written yet
            self._writer.flush()
        try:
            return self._delete(selection, rewrite)
        except FAILURES as error:
            if self._database.is_damage(error):
                raise damaged(self.name, f"nothing was forgotten: {reason(error)}") from error
            raise CacheError(f"nothing was forgotten, the database cannot be changed: {reason(error)}") from error

    def _delete(self, selection: Selection, rewrite: bool) -> int:
        with self._database.engine.connect() as connection:  # does not keep others from writing
            found = deletion_log.search(connection, selection)
        number = 0
        try:
            with self._database.writing() as connection:
                count, number = deletion_log.delete(connection, selection, found)
                self._own[number] = selection
                others = sum(forget(connection, selection) for forget in self.also_forgets)
        except BaseException as error:  # another deletion will get the number
            self._own.pop(number, None)
            if isinstance(error, CacheDamagedError):
                self._database.mark_damage()
            raise
        if count + others:
            self._erasure.mark(rewrite=rewrite)
        return count

    def _newest_deletion(self) -> int:
        with self._reading() as connection:
            return deletion_log.last(connection)

    def pending_deletions(self) -> list[tuple[int, Scope]]:
        """(number, scope) of the deletions that this process has not applied to its memory yet."""
        with self._reading() as connection:
            found = deletion_log.since(connection, self.last_deletion)
        if any(number not in self._own for number, _ in found):  # the others did not end with an erasure, perhaps
            self._erasure.mark()
        return found

    def finish_deletion(self, number: int, scope: Scope) -> None:
        """Mark a deletion as applied, after dropping sequences in its scope that still wait to be written.

        From then on the store accepts new sequences in its scope.
        """
        with contextlib.suppress(CacheError):
            self._writer.flush()

        def leave(jobs: Iterable[SequenceRecord]) -> list[SequenceRecord]:
            self.last_deletion = number
            allowed, dropped = self._allowed(jobs, [(number, scope)])
            self._writer.dropped += dropped
            return allowed

        self._writer.revise(leave)
        self._own.pop(number, None)

    def secure_erase(self, *, now: bool = False) -> None:
        """Erase every byte of deleted rows from the database and its journal.

        If another process is reading meanwhile, or `CacheError` is raised, a later call finishes the erasure.
        """
        try:
            self._erasure.finish(now=now)
        except FAILURES as error:
            raise CacheError(f"deleted, but bytes may be left in {self._database.name}: {reason(error)}") from error

    @property
    def erasure_pending(self) -> bool:
        """Whether bytes of what was deleted may still be there, because others read it or the disk is full."""
        return self._erasure.is_pending

    def compact(self) -> None:
        """Flush, return unused space to the file system and empty the journal. Raises `CacheError` on failure."""
        self.flush()
        for _ in range(_ATTEMPTS):
            self._erasure.mark(rewrite=True)
            self.secure_erase(now=True)
            if not self.erasure_pending:
                return
        raise CacheError(f"{self._database.name} is in use: not everything could be given back, try again later")

    def disk_bytes(self) -> int:
        """Size of the database with its journal; the last known size if it does not answer."""
        with contextlib.suppress(*FAILURES, OSError):
            self._disk_bytes = self._database.disk_bytes()
        return self._disk_bytes

    def close(self) -> None:
        """Write the waiting sequences and release the database. Idempotent."""
        self._writer.close()
        self._database.close()

    # In the writer's thread.

    def _commit(self, jobs: list[SequenceRecord]) -> int:
        left_out = self._write(jobs)
        try:
            self.enforce_budget()
        except Exception as error:  # what was written above is committed whatever fails here
            _log.warning("the database cannot be kept within its budget: %s", reason(error))
        return left_out

    def _write(self, jobs: list[SequenceRecord]) -> int:
        # First, while others may write.
        encoded = {id(job): codec.encode(job) for job in jobs}
        # A sequence becomes durable when this transaction commits, at the end of the block.
        with self._database.writing() as connection:
            # Deletions that this process has not applied yet: waiting sequences in their scope must not be written.
            allowed, dropped = self._allowed(jobs, deletion_log.since(connection, self.last_deletion))
            added = [encoded[id(job)] for job in allowed]
            # A commit whose confirmation was lost is tried again: its rows may exist already.
            insert = self._database.insert(sequences).on_conflict_do_nothing()
            return dropped + write_rows(self._database, connection, insert, added)

    def _allowed(
        self, jobs: Iterable[SequenceRecord], deletions: Sequence[tuple[int, Scope]]
    ) -> tuple[list[SequenceRecord], int]:
        """The sequences that may still be written after these deletions.

        Also how many were dropped that need not have been: what another process searched for is known there alone.
        """
        if not deletions:
            return list(jobs), 0
        kept: list[SequenceRecord] = []
        unsearched = 0
        for job in jobs:
            if covering := [one for one in deletions if self._covers(*one, job)]:
                unsearched += all(scope.searched and number not in self._own for number, scope in covering)
            else:
                kept.append(job)
        return kept, unsearched

    def _covers(self, number: int, scope: Scope, job: SequenceRecord) -> bool:
        if not (scope.concerns(job.namespace) and scope.covers(job.session, job.created_at)):
            return False
        return number not in self._own or self._own[number].holds(np.concatenate((job.context, job.tokens)))


def _size(job: SequenceRecord) -> int:
    return _JOB_BYTES + 4 * (len(job.tokens) + len(job.context))


def _identity(row: SequenceRecord) -> bytes:
    """A hash over namespace, session, context and tokens: equal for equal sequences, whenever they were stored."""
    names = json.dumps([row.namespace.key, row.session])
    digest = hashlib.sha256(names.encode())
    for tokens in (row.context, row.tokens):
        digest.update(len(tokens).to_bytes(8, "little") + tokens.astype("<i4").tobytes())
    return digest.digest()
