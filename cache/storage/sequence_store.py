"""Sequences in a database: written by a background thread, read on open, and as other processes add to them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import sqlalchemy as sa
from sqlalchemy import exc

from agentspec.cache.deletion import Scope, Selection
from agentspec.cache.record import SequenceRecord
from agentspec.cache.storage import codec, deletion_log
from agentspec.cache.storage.batch_writer import BatchWriter
from agentspec.cache.storage.connection import acquire_writer, open_database, raise_unusable
from agentspec.cache.storage.database import Database, reason
from agentspec.cache.storage.disk_budget import DiskBudget
from agentspec.cache.storage.migration import prepare
from agentspec.cache.storage.schema import damaged, learned, sequences
from agentspec.cache.storage.segment_folder import NoSegmentFolder, SegmentFolder
from agentspec.errors import (
    CacheError,
    CacheFormatError,
    CacheUnavailableError,
)
from agentspec.types import Namespace

_REWRITTEN = 512 << 20  # bytes; rewriting a larger database would keep other processes from writing for too long
_ATTEMPTS = 5  # to write the database anew beside others, each of which waits for them for seconds
_ROOM = 64 << 20  # bytes of outputs that wait for a database that cannot be written
_JOB_BYTES = 1024  # bytes of the objects around an output
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _UsageUpdate:
    hits: list[tuple[int, int]]
    learned: dict[str, bytes]


_Job = SequenceRecord | _UsageUpdate


class SequenceStore:
    """The sequences of one database. Thread-safe. Open it with `SequenceStore.open`."""

    def __init__(self, database: Database, segments: SegmentFolder, budget: DiskBudget) -> None:
        self.segments = segments
        self._database = database
        self._budget = budget
        self._writer: BatchWriter[_Job] = BatchWriter(
            self._commit,
            name="agentspec-cache-writer",
            is_transient=database.is_transient,
            describe=reason,
            size=_size,
            room=_ROOM,
        )
        self._poll_lock = threading.Lock()
        self.last_id = 0  # rows up to this one were read or looked over
        self._disk_bytes = 0
        self._erase_pending = database.is_writer  # a process killed after a deletion may have left bytes behind
        with database.engine.connect() as connection:
            self.last_deletion = deletion_log.last(connection)  # the last that this process has applied

    @classmethod
    def open(
        cls,
        target: str | Path,
        *,
        disk_bytes: int | None,
        mode: Literal["auto", "writer", "follower"],
        tenant_disk_bytes: int | None = None,
    ) -> SequenceStore:
        """The database at `target`, a folder or an address.

        Raises `CacheLockedError`, `CacheFormatError`, `CacheUnavailableError` where it may work at another time or for
        another user, and `ConfigurationError` for what cannot be a database.
        """
        database = open_database(target)
        try:
            acquire_writer(database, mode)
            database.connect()
            prepare(database)
            segments = SegmentFolder(database.folder) if database.folder else NoSegmentFolder()
            return cls(database, segments, DiskBudget(database, segments, disk_bytes, tenant_disk_bytes))
        except (OSError, exc.DBAPIError) as error:
            database.close()
            raise_unusable(database.name, error, transient=database.is_transient(error))
        except BaseException:
            database.close()
            raise

    @property
    def folder(self) -> Path | None:
        """Where the files are; None for a database server."""
        return self._database.folder

    @property
    def mode(self) -> Literal["writer", "follower"]:
        return "writer" if self._database.is_writer else "follower"

    @property
    def error(self) -> str | None:
        """Why nothing is written now."""
        return self._writer.error

    @property
    def dropped(self) -> int:
        """Writes given up."""
        return self._writer.dropped

    @property
    def disk_limit(self) -> int | None:
        """Bytes that database and segments may take."""
        return self._budget.limit

    def put(self, record: SequenceRecord) -> None:
        """Store a sequence soon; `flush` waits for it."""
        self._writer.put(record)

    def put_usage(self, hits: list[tuple[int, int]], learned: dict[str, bytes]) -> None:
        """Add hits to sequences; the writer also saves what each namespace (by key) learned."""
        is_writer = self._database.is_writer
        if hits or (learned and is_writer):
            self._writer.put(_UsageUpdate(hits, learned if is_writer else {}))

    def flush(self) -> None:
        """Return when everything put so far is durable. Raises `CacheError` when it is not."""
        self._writer.flush()

    def renew_lease(self) -> None:
        """Stay the writer. Called every now and then."""
        self._database.renew_lease()

    def enforce_budget(self) -> None:
        """Keep the database within its budgets, whichever process wrote to it. Called every now and then."""
        self._budget.enforce()

    def newest(self, limit: int, beyond: Mapping[str, int] | None = None) -> list[SequenceRecord]:
        """The newest sequences of at most `limit` tokens together, oldest first. Raises `CacheFormatError` for damage.

        Of the namespaces (by key) in `beyond` only rows after the one given.
        """
        found: list[SequenceRecord] = []
        with self._reading() as connection:
            self.last_id = connection.execute(sa.select(sa.func.max(sequences.c.id))).scalar() or 0
            with contextlib.closing(self._newest(connection, beyond or {})) as rows:
                for row in rows:
                    limit -= row.token_count
                    if limit < 0:
                        break
                    found.append(self._decode(row))
        return found[::-1]

    def _newest(self, connection: sa.Connection, beyond: Mapping[str, int]) -> Generator[sa.Row[Any]]:
        """Rows up to `last_id`, newest first: of each namespace in `beyond`, then of the others."""
        id_, namespace = sequences.c.id, sequences.c.namespace
        conditions = [sa.and_(namespace == key, id_ > last) for key, last in beyond.items()]
        others = set(connection.execute(sa.select(namespace).distinct()).scalars()) - beyond.keys()
        for condition in (*conditions, namespace.in_(others)):
            query = sa.select(sequences).where(id_ <= self.last_id, condition).order_by(id_.desc())
            with connection.execute(query.execution_options(yield_per=256)) as rows:
                yield from rows

    def poll(self, process: int) -> list[SequenceRecord]:
        """Sequences that processes other than `process` added since the last call. Raises `CacheError`."""
        with self._poll_lock, self._reading() as connection:
            newest = connection.execute(sa.select(sa.func.max(sequences.c.id))).scalar() or 0
            if newest <= self.last_id:
                return []
            query = sa.select(sequences).where(
                sequences.c.id > self.last_id,
                sequences.c.id <= newest,
                sa.not_(sequences.c.number.between(process << 32, ((process + 1) << 32) - 1)),
            )
            rows = connection.execute(query.order_by(sequences.c.id)).all()
            self.last_id = newest
        return list(self._readable(rows))

    def records(self) -> Iterator[SequenceRecord]:
        """Every sequence, oldest first, read as they are asked for. Raises `CacheFormatError` for damage."""
        query = sa.select(sequences).order_by(sequences.c.id).execution_options(yield_per=256)
        with self._reading() as connection, connection.execute(query) as rows:
            for row in rows:
                yield self._decode(row)

    def problems(self) -> Iterator[str]:
        """What is wrong with the database: its structure, then every sequence that cannot be read."""
        query = sa.select(sequences).execution_options(yield_per=256)
        try:
            with self._reading() as connection:
                yield from (f"{self._database.name}: {problem}" for problem in self._database.problems(connection))
                with connection.execute(query) as rows:
                    for row in rows:
                        try:
                            self._decode(row)
                        except CacheFormatError as error:
                            yield str(error)
        except CacheError as error:
            yield str(error)

    def _readable(self, rows: Iterable[sa.Row[Any]]) -> Iterator[SequenceRecord]:
        for row in rows:
            try:
                yield self._decode(row)
            except CacheFormatError as error:
                _log.warning("%s", error)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        try:
            with self._database.engine.connect() as connection:
                yield connection
        except exc.DBAPIError as error:
            if self._database.is_transient(error):
                raise CacheUnavailableError(f"{self._database.name} cannot be read: {reason(error)}") from error
            raise damaged(self._database.name, reason(error)) from error

    # Deletions.

    def forget(self, selection: Selection) -> int:
        """Delete what a selection means in one transaction, and log it for other processes; returns how many sequences.

        What other processes have yet to write is refused when they write it. Their memory follows `pending_deletions`.
        Raises `CacheError` when it cannot be done; then nothing is forgotten.
        """
        with contextlib.suppress(CacheError):  # what cannot be written yet is left to `finish_deletion`
            self._writer.flush()
        try:
            with self._database.engine.connect() as connection:
                found = deletion_log.search(connection, selection, self._holds)
            with self._database.writing() as connection:
                count = deletion_log.delete(connection, selection, found, self._holds)
        except exc.DBAPIError as error:
            raise CacheError(f"nothing was forgotten, the database cannot be changed: {reason(error)}") from error
        self._erase_pending = True
        return count

    def expire(self, selection: Selection) -> int:
        """`forget`, unless there is nothing to forget."""
        with self._reading() as connection:
            found = deletion_log.search(connection, selection, self._holds)
        return self.forget(selection) if found.ids else 0

    def deletions_since(self, number: int) -> list[Scope]:
        """The deletions after one of that number."""
        with self._reading() as connection:
            return [scope for _, scope in deletion_log.since(connection, number)]

    def pending_deletions(self) -> list[tuple[int, Scope]]:
        """Deletions that this process has not applied to its memory yet, by number."""
        with self._reading() as connection:
            found = deletion_log.since(connection, self.last_deletion)
        self._erase_pending = self._erase_pending or bool(found)
        return found

    def finish_deletion(self, number: int, scope: Scope) -> None:
        """From now on write again what lies in a deletion's scope: nothing from before it is waiting any more."""
        with contextlib.suppress(CacheError):
            self._writer.flush()

        def leave(jobs: Iterable[_Job]) -> list[_Job]:
            self.last_deletion = number
            return _allowed(jobs, [scope])

        self._writer.revise(leave)

    def numbers(self, namespace: Namespace, *, until: int | None = None) -> set[int]:
        """The sequences that are stored for a namespace, in rows up to `until`."""
        with self._reading() as connection:
            return set(connection.execute(sa.select(sequences.c.number).where(*_rows(namespace, until))).scalars())

    def extent(self, namespace: Namespace, *, until: int) -> tuple[int, int]:
        """How many rows up to `until` a namespace has, and the sequence in the last. Much quicker than `numbers`."""
        mine = _rows(namespace, until)
        newest = sa.select(sequences.c.number).where(*mine).order_by(sequences.c.id.desc()).limit(1)
        with self._reading() as connection:
            count = connection.execute(sa.select(sa.func.count()).where(*mine)).scalar_one()
            return count, connection.execute(newest).scalar() or 0

    def secure_erase(self, *, rewrite: bool = False) -> None:
        """Leave no byte of what was deleted in the database and its journal; `rewrite` them whole if not too large.

        Where another process is reading meanwhile, it is for the next call to finish, as where `CacheError` is raised.
        """
        if not (self._erase_pending or rewrite):
            return
        self._erase_pending = True
        try:
            self._erase_pending = not self._database.secure_erase(rewrite=rewrite and self.disk_bytes() <= _REWRITTEN)
        except exc.DBAPIError as error:
            raise CacheError(
                f"deleted, but bytes of it may be left in {self._database.name}: {reason(error)}"
            ) from error

    def compact(self) -> None:
        """Write what is left, give unused room back, empty the journal. Raises `CacheError` when it cannot be done."""
        self.flush()
        for _ in range(_ATTEMPTS):
            self.secure_erase(rewrite=True)
            if not self._erase_pending:
                return
        raise CacheError(f"{self._database.name} is in use: not everything could be given back, try again later")

    def _holds(self, row: sa.Row[Any], selection: Selection) -> bool:
        try:
            record = self._decode(row)
        except CacheFormatError:
            return True  # it cannot be read to tell, nor used
        return selection.holds(np.concatenate((record.context, record.tokens)))

    def learned(self) -> dict[str, bytes]:
        """What was learned about drafting, by namespace key. Raises `CacheFormatError` for damage."""
        with self._reading() as connection:
            return {row.namespace: row.state for row in connection.execute(sa.select(learned))}

    def disk_bytes(self) -> int:
        """Size of the database with its journal; of one that does not answer, what it was."""
        with contextlib.suppress(exc.DBAPIError, OSError):
            self._disk_bytes = self._database.disk_bytes()
        return self._disk_bytes

    def close(self) -> None:
        """Write what is left and release the database. Idempotent."""
        self._writer.close()
        self._database.close()

    def _decode(self, row: sa.Row[Any]) -> SequenceRecord:
        return codec.decode(row, self._database.name)

    # In the writer's thread.

    def _commit(self, jobs: list[_Job]) -> None:
        with self._database.writing() as connection:
            # A deletion of another process that this one has not applied yet: what it covers came before it.
            scopes = [scope for _, scope in deletion_log.since(connection, self.last_deletion)]
            allowed = _allowed(jobs, scopes)
            added = [codec.encode(job) for job in allowed if isinstance(job, SequenceRecord)]
            if added:
                # A commit whose answer was lost is tried again: its rows may be there.
                insert = self._database.insert(sequences).on_conflict_do_nothing(index_elements=["number"])
                connection.execute(insert, added)
            for job in allowed:
                if isinstance(job, _UsageUpdate):
                    self._save_usage(connection, job)
        try:
            self._budget.enforce()
        except (exc.DBAPIError, OSError) as error:
            _log.warning("the database cannot be kept within its budget: %s", reason(error))

    def _save_usage(self, connection: sa.Connection, usage: _UsageUpdate) -> None:
        for number, hits in usage.hits:
            mine = sequences.update().where(sequences.c.number == number)
            connection.execute(mine.values(hits=sequences.c.hits + hits))
        for namespace, state in usage.learned.items():
            saved = self._database.insert(learned).values(namespace=namespace, state=state)
            connection.execute(saved.on_conflict_do_update(index_elements=["namespace"], set_={"state": state}))


def _allowed(jobs: Iterable[_Job], scopes: Sequence[Scope]) -> list[_Job]:
    """What may be written after the deletions of these scopes: no sequence that they cover, nothing learned before."""
    if not scopes:
        return list(jobs)
    kept = (job for job in jobs if not (isinstance(job, SequenceRecord) and _covered(job, scopes)))
    return [_UsageUpdate(job.hits, {}) if isinstance(job, _UsageUpdate) else job for job in kept]


def _rows(namespace: Namespace, until: int | None) -> list[sa.ColumnElement[bool]]:
    mine = sequences.c.namespace == namespace.key
    return [mine] if until is None else [mine, sequences.c.id <= until]


def _covered(record: SequenceRecord, scopes: Sequence[Scope]) -> bool:
    meta = record.meta
    return any(scope.concerns(record.namespace) and scope.covers(meta.session, meta.created_at) for scope in scopes)


def _size(job: _Job) -> int:
    return _JOB_BYTES + (4 * (len(job.tokens) + len(job.context)) if isinstance(job, SequenceRecord) else 0)
