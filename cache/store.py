"""Sequences on disk: written behind by one thread, read on open, other processes' rows picked up as they come."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.dialects.sqlite import insert

from agentspec.cache import deletions
from agentspec.cache.batch_writer import BatchWriter
from agentspec.cache.forgetting import Scope, Selection
from agentspec.cache.row import Row
from agentspec.cache.schema import damaged, learned, open_database, sequences
from agentspec.cache.segments import Segments
from agentspec.cache.writer_lock import WriterLock
from agentspec.errors import CacheError, CacheFormatError, CacheLockedError, ConfigurationError
from agentspec.types import Labels, Namespace

DATABASE = "sequences.sqlite3"
_POLL_SECONDS = 1.0
_REWRITTEN = 512 << 20  # bytes; rewriting a larger database would keep other processes from writing for too long
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _UsageUpdate:
    hits: list[tuple[int, int]]
    learned: dict[str, bytes]


class Store:
    """The database of one folder. Thread-safe. Open it with `Store.open`."""

    def __init__(self, folder: Path, engine: sa.Engine, lock: WriterLock | None, disk_bytes: int | None) -> None:
        self.folder = folder
        self.mode: Literal["writer", "follower"] = "writer" if lock else "follower"
        self.segments = Segments(folder)
        self.disk_limit = disk_bytes
        self._engine = engine
        self._lock = lock
        self._writer: BatchWriter[Row | _UsageUpdate] = BatchWriter(self._commit, name="agentspec-cache-writer")
        self._poll_lock = threading.Lock()
        self._polled_at = time.monotonic()
        self.last_id = 0  # rows up to this one were read or looked over
        self._unscrubbed = self._lock is not None  # a process killed after a forget may have left bytes behind
        with engine.connect() as connection:
            self.settled = deletions.last(connection)  # the last forget that this process has followed

    @classmethod
    def open(cls, folder: Path, *, disk_bytes: int | None, mode: Literal["auto", "writer", "follower"]) -> Store:
        """Raises `CacheLockedError`, `CacheFormatError`, and `ConfigurationError` for a folder that cannot be used."""
        folder = folder.expanduser().absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = cls._take_lock(folder, mode)
        except OSError as error:
            raise ConfigurationError(f"the cache folder {folder} cannot be used: {error}", param="path") from error
        try:
            engine = open_database(folder / DATABASE)
        except BaseException as error:
            if lock:
                lock.release()
            if isinstance(error, OSError | exc.OperationalError):
                message = f"the cache database in {folder} cannot be opened: {error}"
                raise ConfigurationError(message, param="path") from error
            raise
        return cls(folder, engine, lock, disk_bytes)

    @staticmethod
    def _take_lock(folder: Path, mode: str) -> WriterLock | None:
        if mode == "follower":
            return None
        try:
            return WriterLock(folder)
        except CacheLockedError:
            if mode == "writer":
                raise
            return None

    @property
    def error(self) -> str | None:
        """Why nothing is written any more."""
        return self._writer.error

    def put(self, row: Row) -> None:
        """Store a sequence soon; `flush` waits for it."""
        self._writer.put(row)

    def put_usage(self, hits: list[tuple[int, int]], learned: dict[str, bytes]) -> None:
        """Add hits to sequences; the writer also saves what each namespace (by key) learned."""
        if hits or (learned and self._lock):
            self._writer.put(_UsageUpdate(hits, learned if self._lock else {}))

    def flush(self) -> None:
        """Return when everything put so far is durable. Raises `CacheError` when it cannot be written."""
        self._writer.flush()

    def newest(self, most: int, beyond: Mapping[str, int] | None = None) -> list[Row]:
        """The newest rows of at most `most` tokens together, oldest first. Raises `CacheFormatError` for damage.

        Of the namespaces (by key) in `beyond` only rows after the one given.
        """
        rows: list[Row] = []
        try:
            with self._engine.connect() as connection:
                self.last_id = connection.execute(sa.select(sa.func.max(sequences.c.id))).scalar() or 0
                for record in self._newest(connection, beyond or {}):
                    most -= record.token_count
                    if most < 0:
                        break
                    rows.append(self._row(record))
        except exc.DatabaseError as error:
            raise damaged(self.folder / DATABASE, error) from error
        return rows[::-1]

    def _newest(self, connection: sa.Connection, beyond: Mapping[str, int]) -> Iterator[sa.Row[Any]]:
        """Records up to `last_id`, newest first: of each namespace in `beyond`, then of the others."""
        id_, namespace = sequences.c.id, sequences.c.namespace
        conditions = [sa.and_(namespace == key, id_ > row) for key, row in beyond.items()]
        others = set(connection.execute(sa.select(namespace).distinct()).scalars()) - beyond.keys()
        for condition in (*conditions, namespace.in_(others)):
            query = sa.select(sequences).where(id_ <= self.last_id, condition).order_by(id_.desc())
            yield from connection.execute(query.execution_options(yield_per=256))

    def news(self, origin: int, *, now: bool = False) -> list[Row] | None:
        """Rows that processes other than `origin` added since the last look; None within a second, unless `now`."""
        with self._poll_lock:
            if not now and time.monotonic() - self._polled_at < _POLL_SECONDS:
                return None
            self._polled_at = time.monotonic()
            query = sa.select(sequences).where(sequences.c.id > self.last_id).order_by(sequences.c.id)
            try:
                with self._engine.connect() as connection:
                    records = connection.execute(query).all()
            except exc.DatabaseError as error:
                _log.warning("new sequences of other processes cannot be read: %s", error)
                return []
            self.last_id = max((record.id for record in records), default=self.last_id)
        return list(self._readable(record for record in records if record.number >> 32 != origin))

    def rows(self) -> Iterator[Row]:
        """Every sequence, oldest first, read as they are asked for. Raises `CacheFormatError` for damage."""
        query = sa.select(sequences).order_by(sequences.c.id).execution_options(yield_per=256)
        try:
            with self._engine.connect() as connection:
                for record in connection.execute(query):
                    yield self._row(record)
        except exc.DatabaseError as error:
            raise damaged(self.folder / DATABASE, error) from error

    def problems(self) -> Iterator[str]:
        """What is wrong with the database: its structure, then every sequence that cannot be read."""
        try:
            with self._engine.connect() as connection:
                said = connection.exec_driver_sql("PRAGMA integrity_check").scalars().all()
                yield from (f"{self.folder / DATABASE}: {line}" for line in said if line != "ok")
                for record in connection.execute(sa.select(sequences).execution_options(yield_per=256)):
                    try:
                        self._row(record)
                    except CacheFormatError as error:
                        yield str(error)
        except exc.DatabaseError as error:
            yield str(damaged(self.folder / DATABASE, error))

    def _readable(self, records: Iterable[sa.Row[tuple[object, ...]]]) -> Iterator[Row]:
        for record in records:
            try:
                yield self._row(record)
            except CacheFormatError as error:
                _log.warning("%s", error)

    # Forgetting.

    def forget(self, selection: Selection) -> int:
        """Delete what a selection means, as one transaction, and tell the other processes; returns how many sequences.

        What other processes have yet to write is refused when they write it. Their memory follows by `unsettled`.
        Raises `CacheError` when it cannot be done; then nothing is forgotten.
        """
        with contextlib.suppress(CacheError):  # a writer that failed has nothing left to write
            self._writer.flush()
        try:
            found = deletions.search(self._engine, selection, self._holds)
            with self._engine.begin() as connection:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
                count = deletions.delete(connection, selection, found, self._holds)
        except exc.DatabaseError as error:
            raise CacheError(f"nothing was forgotten, the database cannot be changed: {error}") from error
        self._unscrubbed = True
        return count

    def expire(self, selection: Selection) -> int:
        """`forget`, unless there is nothing to forget."""
        try:
            found = deletions.search(self._engine, selection, self._holds)
        except exc.DatabaseError as error:
            raise CacheError(f"the database cannot be read: {error}") from error
        return self.forget(selection) if found.ids else 0

    def forgotten_since(self, number: int) -> list[Scope]:
        """The forgets after one of that number."""
        with self._engine.connect() as connection:
            return [scope for _, scope in deletions.since(connection, number)]

    def unsettled(self) -> list[tuple[int, Scope]]:
        """Forgets that this process has not followed yet, by number."""
        with self._engine.connect() as connection:
            found = deletions.since(connection, self.settled)
        self._unscrubbed = self._unscrubbed or bool(found)
        return found

    def settle(self, number: int) -> None:
        """From now on write again what lies in the scope of a forget: nothing from before it is waiting any more."""
        with contextlib.suppress(CacheError):
            self._writer.flush()
        self.settled = number

    def numbers(self, namespace: Namespace, *, until: int | None = None) -> set[int]:
        """The sequences that are stored for a namespace, in rows up to `until`."""
        with self._engine.connect() as connection:
            return set(connection.execute(sa.select(sequences.c.number).where(*_rows(namespace, until))).scalars())

    def extent(self, namespace: Namespace, *, until: int) -> tuple[int, int]:
        """How many rows up to `until` a namespace has, and the sequence in the last. Much quicker than `numbers`."""
        rows = _rows(namespace, until)
        newest = sa.select(sequences.c.number).where(*rows).order_by(sequences.c.id.desc()).limit(1)
        with self._engine.connect() as connection:
            count = connection.execute(sa.select(sa.func.count()).where(*rows)).scalar_one()
            return count, connection.execute(newest).scalar() or 0

    def scrub(self, *, rewrite: bool = False) -> None:
        """Leave no byte of what was deleted in the database and its journal; `rewrite` them whole if not too large.

        Where another process is reading meanwhile, it is for the next call to finish.
        """
        if self._unscrubbed or rewrite:
            self._unscrubbed = not deletions.scrub(self._engine, rewrite=rewrite and self.disk_bytes() <= _REWRITTEN)

    def compact(self) -> int:
        """Write what is left, give unused room back to the file system and empty the journal; returns bytes on disk.

        Raises `CacheError` when it cannot be done.
        """
        self.flush()
        self.scrub(rewrite=True)
        if self._unscrubbed:
            raise CacheError(f"{self.folder} is in use: not everything could be given back, try again later")
        return self.disk_bytes()

    def _holds(self, record: sa.Row[tuple[object, ...]], selection: Selection) -> bool:
        try:
            row = self._row(record)
        except CacheFormatError:
            return True  # nobody can tell, and nobody can use it
        return selection.holds(np.concatenate((row.context, row.tokens)))

    def learned(self) -> dict[str, bytes]:
        """What was learned about drafting, by namespace key. Raises `CacheFormatError` for damage."""
        try:
            with self._engine.connect() as connection:
                return {row.namespace: row.state for row in connection.execute(sa.select(learned))}
        except exc.DatabaseError as error:
            raise damaged(self.folder / DATABASE, error) from error

    def disk_bytes(self) -> int:
        """Size of the database with its journal."""
        files = (self.folder / (DATABASE + suffix) for suffix in ("", "-wal", "-shm"))
        return sum(file.stat().st_size for file in files if file.exists())

    def close(self) -> None:
        """Write what is left and release the folder. Idempotent."""
        self._writer.close()
        self._engine.dispose()
        if self._lock:
            self._lock.release()

    def _row(self, record: sa.Row[tuple[object, ...]]) -> Row:
        try:
            packed = np.frombuffer(zlib.decompress(record.tokens), dtype="<i4").astype(np.int32)
        except (zlib.error, ValueError) as error:
            raise damaged(self.folder / DATABASE, f"sequence {record.id}: {error}") from error
        if len(packed) < record.token_count or packed.min(initial=0) < 0:
            raise damaged(self.folder / DATABASE, f"sequence {record.id}")
        split = len(packed) - record.token_count
        return Row(
            record.number,
            Namespace(record.tenant, record.model_fingerprint, record.tokenizer_hash, record.template_hash),
            Labels(record.session, record.workflow, record.step),
            packed[split:],
            packed[:split],
            record.created_at,
        )

    # In the writer's thread.

    def _commit(self, jobs: list[Row | _UsageUpdate]) -> None:
        with self._engine.begin() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            # A forget of another process that this one has not followed yet: what it covers came before it.
            scopes = [scope for _, scope in deletions.since(connection, self.settled)]
            rows = [_record(job) for job in jobs if isinstance(job, Row) and not _covered(job, scopes)]
            if rows:
                connection.execute(sequences.insert(), rows)
            for job in jobs:
                if isinstance(job, _UsageUpdate):
                    self._save_usage(connection, _UsageUpdate(job.hits, {}) if scopes else job)
        if self.disk_limit is not None and self._lock:
            self._fit(self.disk_limit)

    def _save_usage(self, connection: sa.Connection, usage: _UsageUpdate) -> None:
        for number, hits in usage.hits:
            row = sequences.update().where(sequences.c.number == number)
            connection.execute(row.values(hits=sequences.c.hits + hits))
        for namespace, state in usage.learned.items():
            saved = insert(learned).values(namespace=namespace, state=state)
            connection.execute(saved.on_conflict_do_update(index_elements=["namespace"], set_={"state": state}))

    def _fit(self, limit: int) -> None:
        """Segments go first: they can be had again."""
        if self.disk_bytes() + self.segments.total_bytes() > limit:
            self.segments.clear()
        if self.disk_bytes() > limit:
            self._shrink(limit)

    def _shrink(self, limit: int) -> None:
        """Delete the oldest sequences, an eighth at a time, and give their room back to the file system."""
        self._vacuum()
        while self.disk_bytes() > limit:
            with self._engine.begin() as connection:
                total = connection.execute(sa.select(sa.func.count()).select_from(sequences)).scalar_one()
                oldest = sa.select(sequences.c.id).order_by(sequences.c.id).limit(max(1, total // 8))
                connection.execute(sequences.delete().where(sequences.c.id.in_(oldest)))
            self._vacuum()
            if total <= 1:
                break

    def _vacuum(self) -> None:
        connection = self._engine.raw_connection()
        try:
            # A script runs each statement to its end; incremental_vacuum frees one page a step.
            connection.cursor().executescript("PRAGMA incremental_vacuum; PRAGMA wal_checkpoint(TRUNCATE);")
        finally:
            connection.close()


def _rows(namespace: Namespace, until: int | None) -> list[sa.ColumnElement[bool]]:
    mine = sequences.c.namespace == namespace.key
    return [mine] if until is None else [mine, sequences.c.id <= until]


def _covered(row: Row, scopes: Sequence[Scope]) -> bool:
    return any(scope.concerns(row.namespace) and scope.covers(row.labels.session, row.created_at) for scope in scopes)


def _record(row: Row) -> dict[str, object]:
    packed = np.concatenate((row.context, row.tokens)).astype("<i4")
    return {
        "number": row.sequence,
        "namespace": row.namespace.key,
        "tenant": row.namespace.tenant,
        "model_fingerprint": row.namespace.model_fingerprint,
        "tokenizer_hash": row.namespace.tokenizer_hash,
        "template_hash": row.namespace.template_hash,
        "session": row.labels.session,
        "workflow": row.labels.workflow,
        "step": row.labels.step,
        "token_count": len(row.tokens),
        "tokens": zlib.compress(packed.tobytes(), level=1),
        "created_at": row.created_at,
        "hits": 0,
    }
