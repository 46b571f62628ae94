"""The sequences in a database: a background thread writes them; they are read at open and as other processes add."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray

from agentspec.cache.deletion import Scope, Selection
from agentspec.cache.storage import codec, deletion_log, learned
from agentspec.cache.storage.batch_writer import BatchWriter
from agentspec.cache.storage.database import FAILURES, Database, PendingErasure, reason, write_rows
from agentspec.cache.storage.opening import opening, prepare, replace_damaged
from agentspec.cache.storage.reader import SequenceReader
from agentspec.cache.storage.schema import damaged, sequences
from agentspec.cache.storage.segments import SegmentFolder
from agentspec.cache.tokens import SequenceRecord
from agentspec.errors import CacheDamagedError, CacheError, CacheLockedError
from agentspec.types import Namespace

_ATTEMPTS = 5  # tries to rewrite the database; each waits some seconds for other processes
_ROOM = 64 << 20  # bytes of outputs that may wait while the database cannot be written
_LINGER = 0.05  # seconds that an output waits for others: a transaction of its own writes ten times its size
_ROW_BYTES = 512  # that a sequence takes besides its tokens, in the table and in its indexes
_SHARE = 20  # measuring takes at most 1/20 of the time
_JOB_BYTES = 1024  # of the Python objects around an output
_log = logging.getLogger(__name__)


class SequenceStore(SequenceReader):
    """The sequences of one database. Thread-safe but for `poll`. Open it with `SequenceStore.open`.

    Sequences that are put into it get the next of `numbering`, which begin at random: no other process has the same.
    """

    def __init__(
        self, database: Database, segments: SegmentFolder, disk_bytes: int | None, tenant_disk_bytes: int | None
    ) -> None:
        super().__init__(database)
        self.segments = segments
        self.name, self.folder = database.name, database.folder
        self.disk_limit, self._tenant_limit = disk_bytes, tenant_disk_bytes
        self._measured_until = 0.0  # tenants are not measured before
        self._enforcing = threading.Lock()  # two threads that measured the same excess would each delete it
        self.also_forgets: list[Callable[[sa.Connection, Selection], int]] = []  # called in a deletion's transaction
        self._disk_bytes = 0
        self.erasure = PendingErasure(database, pending=database.is_writer)  # a killed process may have left bytes
        self._own: dict[int, Selection] = {}  # this process's deletions that are not applied yet, by number
        with self._reading() as connection:
            self.last_deletion = deletion_log.last(connection)  # the last one applied here
        first = secrets.randbits(62)
        self._own_numbers, self.numbering = range(first, first + (1 << 32)), count(first)
        # Last: its thread would not end if anything before failed.
        self.writer: BatchWriter[SequenceRecord] = BatchWriter(
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
            try:
                if mode != "follower":
                    database.acquire_writer()
            except CacheLockedError:
                if mode == "writer":
                    raise
            database.connect()
            segments = SegmentFolder(database.folder)
            if replace_damaged(database):
                segments.clear()
            prepare(database)
            return cls(database, segments, disk_bytes, tenant_disk_bytes)

    @property
    def mode(self) -> Literal["writer", "follower"]:
        return "writer" if self.database.is_writer else "follower"

    def add_missing(self, records: Iterable[SequenceRecord]) -> tuple[int, int]:
        """Store the sequences that the store lacks, and wait until they are durable; returns (added, known).

        Each stored sequence with the same namespace, tokens and end of the prompt stands for one of `records`:
        those that are added again add nothing, and an output that was generated twice stays in the store twice. Raises
        `CacheError` if the sequences cannot be written.
        """
        there = Counter(map(_identity, self.records()))
        added = known = 0
        for record in records:
            if there[key := _identity(record)] > 0:
                there[key] -= 1
                known += 1
            else:
                self.writer.put(replace(record, sequence=next(self.numbering)))
                added += 1
        self.writer.flush()
        return added, known

    def fresh(self) -> list[SequenceRecord]:
        """The next sequences that other processes have added, as `poll` gives them."""
        return self.poll(self._own_numbers)

    def unwritten(self, namespace: Namespace) -> list[SequenceRecord]:
        """A namespace's sequences that wait to be written. What is read from the database afterwards has the others."""
        if not self.writer.waiting():
            return []
        with self._reading() as connection:  # first: what these cover may be dropped meanwhile
            deletions = deletion_log.since(connection, self.last_deletion)
        waiting, _ = self._allowed(self.writer.waiting(), deletions)
        return [job for job in waiting if job.namespace == namespace]

    # What drafters learned.

    def learned(self, namespace: Namespace) -> NDArray[np.uint8] | None:
        """What was last saved of a namespace, if anything was. Raises `CacheFormatError` where it is damaged."""
        with self._reading() as connection:
            return learned.read(connection, namespace.key)

    def save_learned(self, states: Mapping[str, NDArray[np.uint8]]) -> None:
        """Save what was learned, by the namespace's key, unless a deletion is not applied here. Raises `CacheError`."""
        with self._answering(), self.database.writing() as connection:
            if not deletion_log.since(connection, self.last_deletion):
                learned.write(self.database, connection, states)

    def renew_lease(self) -> bool:
        """Stay the writer, or succeed one that ended; whether this process has just become it. Called periodically."""
        before = self.database.is_writer
        self.database.renew_lease()
        elected = self.database.is_writer and not before
        if elected:
            self.erasure.mark()
        return elected

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
        with self._answering():  # a search does not meet all damage, and misses what it hides
            problems = self.database.problems() if rewrite else []
        if problems:
            raise damaged(self.name, problems[0])
        with contextlib.suppress(CacheError):  # `finish_deletion` handles sequences that cannot be written yet
            self.writer.flush()
        try:
            return self._delete(selection, rewrite)
        except FAILURES as error:
            if self.database.is_damage(error):
                raise damaged(self.name, f"nothing was forgotten: {reason(error)}") from error
            raise CacheError(f"nothing was forgotten, the database cannot be changed: {reason(error)}") from error

    def _delete(self, selection: Selection, rewrite: bool) -> int:
        with self.database.engine.connect() as connection:  # does not keep others from writing
            found = deletion_log.search(connection, selection)
        number = 0
        try:
            with self.database.writing() as connection:
                count, number = deletion_log.delete(connection, selection, found)
                self._own[number] = selection
                others = sum(forget(connection, selection) for forget in self.also_forgets)
        except BaseException as error:  # another deletion will get the number
            self._own.pop(number, None)
            if isinstance(error, CacheDamagedError):
                self.database.mark_damage()
            raise
        if count + others:
            self.erasure.mark(rewrite=rewrite)
        return count

    def pending_deletions(self) -> list[tuple[int, Scope]]:
        """(number, scope) of the deletions that this process has not applied to its memory yet."""
        with self._reading() as connection:
            found = deletion_log.since(connection, self.last_deletion)
        if any(number not in self._own for number, _ in found):  # the others did not end with an erasure, perhaps
            self.erasure.mark()
        return found

    def finish_deletion(self, number: int, scope: Scope) -> None:
        """Mark a deletion as applied, after dropping sequences in its scope that still wait to be written.

        From then on the store accepts new sequences in its scope.
        """
        with contextlib.suppress(CacheError):
            self.writer.flush()

        def leave(jobs: Iterable[SequenceRecord]) -> list[SequenceRecord]:
            self.last_deletion = number
            allowed, dropped = self._allowed(jobs, [(number, scope)])
            self.writer.dropped += dropped
            return allowed

        self.writer.revise(leave)
        self._own.pop(number, None)

    def compact(self) -> None:
        """Flush, return unused space to the file system and empty the journal. Raises `CacheError` on failure."""
        self.writer.flush()
        for _ in range(_ATTEMPTS):
            self.erasure.mark(rewrite=True)
            self.erasure.finish(now=True)
            if not self.erasure.is_pending:
                return
        raise CacheError(f"{self.database.name} is in use: not everything could be given back, try again later")

    def disk_bytes(self) -> int:
        """Size of the database with its journal; the last known size if it does not answer."""
        with contextlib.suppress(*FAILURES, OSError):
            self._disk_bytes = self.database.disk_bytes()
        return self._disk_bytes

    def close(self) -> None:
        """Write the waiting sequences and release the database. Idempotent."""
        self.writer.close()
        self.database.close()

    # Budgets: a tenant over its limit loses only its own sequences, oldest first.

    def enforce_budget(self) -> None:
        """If this process is the writer, delete sequences until the budgets hold. Raises `DBAPIError`."""
        if self.database.is_writer:
            with self._enforcing:
                self._enforce_tenants()
                self._enforce_size()

    def _enforce_tenants(self) -> None:
        if self._tenant_limit is None or time.monotonic() < self._measured_until:
            return
        begun = time.monotonic()
        self._enforce_shares(self._tenant_limit)
        now = time.monotonic()
        self._measured_until = now + _SHARE * (now - begun)

    def _enforce_size(self) -> None:
        # Only the writer makes segments, so that there are no more of them than it knows.
        if self.disk_limit is None or self.database.disk_bytes() + self.segments.known_bytes() <= self.disk_limit:
            return
        if self.database.disk_bytes() + self.segments.total_bytes() > self.disk_limit:
            self.segments.clear()  # segments go first: the database can restore them
            if self.database.disk_bytes() > self.disk_limit:
                self._enforce_limit(self.disk_limit)

    def _enforce_shares(self, limit: int) -> None:
        for tenant, taken in self._tenants():
            if taken > limit:
                self._delete_oldest(tenant, taken - limit + limit // 16)

    def _enforce_limit(self, limit: int) -> None:
        """Delete from the largest tenant, a part at a time, since a row's size in the file is only an estimate."""
        while self.database.shrink() and (excess := self.database.disk_bytes() - limit) > 0:
            tenants = self._tenants()
            # Of a tenant whose name is damaged nothing is found: then the next largest gives.
            if not any(self._delete_oldest(one, max(taken // 8, min(excess, taken // 2))) for one, taken in tenants):
                return

    def tenant_bytes(self) -> dict[str, int]:
        """The bytes of each tenant's rows. Raises `CacheError` where the database does not answer."""
        with self._answering():
            return dict(self._tenants())

    def _tenants(self) -> list[tuple[str, int]]:
        """(tenant, bytes), the largest first."""
        tenant = sequences.c.tenant
        taken = sa.func.sum(sequences.c.size) + _ROW_BYTES * sa.func.count()
        query = sa.select(tenant, taken).group_by(tenant).order_by(taken.desc())
        with self.database.engine.connect() as connection:
            return [(tenant, int(size)) for tenant, size in connection.execute(query)]

    def _delete_oldest(self, tenant: str, size: int) -> bool:
        """Delete about `size` bytes; false where another process has become the writer, or there is none."""
        theirs = sequences.c.tenant == tenant
        query = sa.select(sequences.c.id, sequences.c.size).where(theirs).order_by(sequences.c.id)
        with self.database.writing() as connection:
            if not self.database.confirm_writer(connection):
                return False
            last = 0
            with connection.execute(query.execution_options(yield_per=1024)) as rows:
                for row in rows:
                    last = row.id
                    size -= (row.size if isinstance(row.size, int) else 0) + _ROW_BYTES  # SQLite keeps any value
                    if size <= 0:
                        break
            gone = connection.execute(sequences.delete().where(theirs, sequences.c.id <= last)).rowcount
            return gone > 0

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
        with self.database.writing() as connection:
            # Deletions that this process has not applied yet: waiting sequences in their scope must not be written.
            allowed, dropped = self._allowed(jobs, deletion_log.since(connection, self.last_deletion))
            added = [encoded[id(job)] for job in allowed]
            # A commit whose confirmation was lost is tried again: its rows may exist already.
            insert = self.database.insert(sequences).on_conflict_do_nothing()
            return dropped + write_rows(self.database, connection, insert, added)

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


def _identity(row: SequenceRecord) -> int:
    """A hash over namespace, context and tokens: equal for equal sequences, whichever session stored them."""
    return hash((row.namespace, row.context.tobytes(), row.tokens.tobytes()))
