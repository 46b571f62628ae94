"""Answers of the Responses API, and calls of kept runs, which a cache stores besides its sequences.

They lie in `state.sqlite3` of the cache's folder, in memory, or in the cache's PostgreSQL database.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from agentspec.cache.deletion import ContentFilter, Scope, Selection, pause_between_looks
from agentspec.cache.storage import deletion_log
from agentspec.cache.storage.database import FAILURES, Database, PendingErasure, reason
from agentspec.cache.storage.opening import prepare
from agentspec.cache.storage.schema import Kinds, is_older, is_sound, responses, runs
from agentspec.cache.storage.sqlite import STATE, MemoryDatabase, SqliteDatabase
from agentspec.cache.stored import MOST_UNPACKED, StoredResponse, StoreLimits, packed, texts_of, unpacked
from agentspec.errors import CacheDamagedError, CacheError, CacheFormatError, CacheUnavailableError

if TYPE_CHECKING:
    from agentspec.cache.storage.sequence_store import SequenceStore

_ROW = 512  # bytes that a row takes besides its body
_STEP = 64  # the bounds are checked each time that a process has added 1/64 of them
_ROOM = 16  # then 1/16 of a bound is made free, so that several processes together stay within it
_LOOK_SECONDS = 600.0  # between two looks for what is too old, at most

_KINDS: Kinds = (
    *((name, str) for name in ("id", "tenant")),
    ("session", str | None),
    ("created_at", float | int),
    ("body", bytes),
)


class ResponseStore:
    """Stored answers, which age, are forgotten with the rest of the cache, and take at most so many bytes: of more, the
    oldest of the tenant that has most go. Blocking and thread-safe.

    All methods raise `CacheError` if the database cannot be used.
    """

    def __init__(self, state: State, limits: StoreLimits, table: sa.Table = responses) -> None:
        self.limits = limits
        self._table = table
        self._deleted = 0  # rows by this process
        self._state = state
        self._database = state.database
        self._lock = threading.Lock()
        self._added = limits.total  # bytes since the bounds were checked: the first row checks them
        self._look_at = time.monotonic()

    def put(self, stored: StoredResponse) -> bool:
        """Store an answer; returns on commit. False if it is too large, if a pattern refuses its text, if it was
        forgotten meanwhile, or if another tenant has one of that id.
        """
        body, state = packed(stored), self._state
        if body is None or _ROW + len(body) > self.limits.smallest // 8:  # it would push out too many others
            return False
        if any(map(state.refuses, texts_of(unpacked(body, "")))):
            return False
        with self._writing() as connection:
            # What another process, or this one, deleted while the answer waited here must not come back.
            deletions = deletion_log.since(connection, state.history.known(stored.since))
            if _is_forgotten(stored, deletions, state.history.known(stored.created_at)):
                return False
            connection.execute(
                self._table.delete().where(self._table.c.id == stored.id, self._table.c.tenant == stored.tenant)
            )
            names = ("id", "tenant", "session", "created_at", "previous", "backend")
            row = {name: getattr(stored, name) for name in names} | {"size": len(body), "body": body}
            insert = self._database.insert(self._table).values(**row).on_conflict_do_nothing(index_elements=["id"])
            if connection.execute(insert.returning(self._table.c.id)).first() is None:
                return False
            self._enforce_bounds(connection, len(body) + _ROW)
        return True

    def get(self, tenant: str, id: str) -> StoredResponse | None:
        """The tenant's answer of that id; None if there is none or it is too old."""
        with self._reading() as connection:
            row = connection.execute(sa.select(self._table).where(*self._mine(tenant, id))).first()
        return None if row is None else _read(row)

    def newest(self, tenant: str, most: int, session: str | None = None) -> list[StoredResponse]:
        """The tenant's newest answers, the newest first: of all sessions, or of one. Damaged ones are left out."""
        columns = self._table.c
        wanted = [columns.tenant == tenant, columns.created_at >= self.limits.oldest]
        wanted += [] if session is None else [columns.session == session]
        query = sa.select(self._table).where(*wanted).order_by(columns.created_at.desc(), columns.id).limit(most)
        found: list[StoredResponse] = []
        with self._reading() as connection:
            for row in connection.execute(query):
                with suppress(CacheFormatError):
                    found.append(_read(row))
        return found

    def delete(self, tenant: str, id: str) -> bool:
        """Delete the tenant's answer of that id; returns whether there was one."""
        with self._writing() as connection:
            return self._delete_where(connection, *self._mine(tenant, id)) > 0

    def _mine(self, tenant: str, id: str) -> list[sa.ColumnElement[bool]]:
        return [self._table.c.id == id, self._table.c.tenant == tenant, self._table.c.created_at >= self.limits.oldest]

    def forget_within(self, connection: sa.Connection, selection: Selection) -> int:
        """Delete what the selection covers in the caller's transaction, which erases it."""
        columns = self._table.c
        body = columns.body if selection.searched else sa.literal(b"").label("body")
        query = sa.select(columns.id, columns.tenant, columns.session, columns.created_at, body)
        if selection.tenant is not None:
            query = query.where(columns.tenant == selection.tenant)
        with connection.execute(query.execution_options(yield_per=64)) as rows:
            found = [row.id for row in rows if self._is_covered(selection, row)]
        return self._delete(connection, found)

    def maintain(self) -> None:
        """Called periodically: delete what is too old."""
        if self.limits.seconds is None or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + pause_between_looks(self.limits.seconds, _LOOK_SECONDS)
        old = is_older(self._table.c.created_at, self.limits.oldest)
        with self._reading() as connection:
            found = connection.execute(sa.select(self._table.c.id).where(old).limit(1)).first() is not None
        if found:
            with self._writing() as connection:
                self._delete_where(connection, old)

    def _is_covered(self, selection: Selection, row: Any) -> bool:
        """Whether a deletion takes a row with it. Rows have no tokenizer: one that is named excludes none."""
        if not is_sound(row, _KINDS):
            return True  # it cannot be searched, and is of no use
        if not selection.scope.covers(row.session, row.created_at):
            return False
        try:
            return not selection.searched or selection.is_in(texts_of(unpacked(row.body, "")))
        except CacheFormatError:
            return True

    @contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        with self._named(), self._database.engine.connect() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        """A write transaction, committed at the end; what it deletes is erased later."""
        before = self._deleted
        try:
            with self._named(), self._database.writing() as connection:
                yield connection
        finally:
            if self._deleted != before:
                self._state.erasure.mark()

    @contextmanager
    def _named(self) -> Iterator[None]:
        what = f"{self._table.name} in {self._database.name}"
        try:
            yield
        except FAILURES as error:
            if self._database.is_refusal(error):
                raise CacheError(f"{what} cannot hold this: {reason(error)}") from error
            raise CacheUnavailableError(f"{what} cannot be used now: {reason(error)}") from error

    def _delete(self, connection: sa.Connection, ids: Sequence[str]) -> int:
        if ids:
            connection.execute(
                self._table.delete().where(self._table.c.id == sa.bindparam("old")), [{"old": id} for id in ids]
            )
        self._deleted += len(ids)
        return len(ids)

    def _delete_where(self, connection: sa.Connection, *conditions: sa.ColumnElement[bool]) -> int:
        count = connection.execute(self._table.delete().where(*conditions)).rowcount
        self._deleted += count
        return count

    # Bounds.

    def _enforce_bounds(self, connection: sa.Connection, added: int) -> None:
        """Called in a transaction that adds so many bytes."""
        limits, columns = self.limits, self._table.c
        with self._lock:
            self._added += added
            if self._added < limits.smallest // _STEP:
                return
            self._added = 0
        self._delete_where(connection, is_older(columns.created_at, limits.oldest))
        self._delete_where(connection, sa.not_(columns.size.between(0, MOST_UNPACKED)))  # damaged
        taken = sa.select(sa.func.sum(columns.size + _ROW)).group_by(columns.tenant)
        sizes = [int(size) for size in connection.execute(taken).scalars()]
        share = limits.tenant - limits.tenant // _ROOM if limits.tenant else limits.total
        if sum(sizes) > limits.total - limits.total // _ROOM:
            share = min(share, _level(sizes, limits.total * 7 // 8))
        if max(sizes, default=0) <= share:
            return
        newer = sa.func.sum(columns.size + _ROW).over(
            partition_by=columns.tenant, order_by=[columns.created_at.desc(), columns.id]
        )
        ranked = sa.select(columns.id, newer.label("taken")).subquery()
        over = sa.select(ranked.c.id).where(ranked.c.taken > share)
        self._delete(connection, connection.execute(over).scalars().all())


def _read(row: Any) -> StoredResponse:
    if not is_sound(row, (*_KINDS, ("previous", str | None), ("backend", str | None))):
        raise CacheFormatError(f"the stored response {row.id} is damaged")
    head = (row.id, row.tenant, row.created_at, row.session, row.previous, row.backend)
    return StoredResponse(*head, **unpacked(row.body, row.id))


def _level(sizes: Iterable[int], total: int) -> int:
    """The most that each may take so that all take `total` together: only those that take most have to give."""
    ordered = sorted(sizes)
    left, share = total, 0
    for number, size in enumerate(ordered):
        share = left // (len(ordered) - number)
        if size > share:
            break
        left -= size
    return share


def _is_forgotten(stored: StoredResponse, deletions: Iterable[tuple[int, Scope]], whole: int) -> bool:
    """Whether one of the deletions since it was begun takes along what is about to be stored.

    It does by tenant and session. A search is in what was whole when it ran, before which deletion `whole` was the
    last: what it looked for is known to no one any more, so that all of that goes.
    """
    return any(
        (number > whole or not scope.searched)
        and scope.concerns_tenant(stored.tenant)
        and scope.covers(stored.session, stored.created_at)
        for number, scope in deletions
    )


class State:
    """Opens the state of a cache, and maintains it. Thread-safe.

    Raises `CacheDamagedError` where it cannot be read, and `CacheVersionError`: what is in it cannot be made again, so
    that nothing goes on without it.
    """

    def __init__(
        self,
        store: SequenceStore | None,
        limits: StoreLimits,
        run_limits: StoreLimits,
        content_filter: ContentFilter | None = None,
    ) -> None:
        self.database = _opened(store)
        self.refuses = content_filter.matches if content_filter else lambda text: False
        self._is_shared = store is not None and store.database is self.database
        # A process that was killed may have left bytes.
        pending = store is not None and store.mode == "writer" and not self._is_shared
        self.erasure = PendingErasure(self.database, pending=pending)
        with self.database.engine.connect() as connection:
            self.history = deletion_log.KnownDeletions(deletion_log.last(connection))
        self.responses = ResponseStore(self, limits)
        self.runs = ResponseStore(self, run_limits, runs)
        if store is not None and self._is_shared:
            store.also_forgets += [self.responses.forget_within, self.runs.forget_within]

    def forget(self, selection: Selection) -> None:
        """Delete and erase what the selection covers. In a shared database the deletion of the sequences does so.

        Raises `CacheError` where the database cannot be changed; nothing is deleted then.
        """
        if self._is_shared:
            return
        try:
            with self.database.writing() as connection:
                deletion_log.log(connection, selection.scope)
                gone = [one.forget_within(connection, selection) for one in (self.responses, self.runs)]
        except FAILURES as error:
            raise CacheError(f"{self.database.name} cannot be changed: {reason(error)}") from error
        if any(gone):
            self.erasure.mark(rewrite=True)
            self.erasure.finish(now=True)

    def note_deletions(self) -> None:
        """What is stored from now on came after the deletions of before."""
        with suppress(*FAILURES), self.database.engine.connect() as connection:  # else they count as later ones
            self.history.note(deletion_log.last(connection))

    def maintain(self) -> None:
        """Delete what is too old. To be called now and then."""
        try:
            self.responses.maintain()
            self.runs.maintain()
        finally:
            self.note_deletions()
            self.erasure.finish()

    def close(self) -> None:
        """Release the database. Idempotent."""
        if not self._is_shared:
            self.database.close()


def _opened(store: SequenceStore | None) -> Database:
    if store is None:
        database: Database = MemoryDatabase()
    elif store.folder is None:
        return store.database  # which is open, with all tables
    else:
        database = SqliteDatabase(store.folder, file=STATE)
    try:
        database.connect()
        prepare(database)
    except BaseException as error:
        database.close()
        if isinstance(error, FAILURES) and not database.is_damage(error):
            raise CacheError(f"{database.name} cannot be opened: {reason(error)}") from error
        if isinstance(error, (*FAILURES, CacheDamagedError)):
            raise CacheDamagedError(
                f"{database.name}, which holds stored responses, is damaged: {reason(error)};"
                " stop what uses it, and restore a backup, or move it away, which forgets them all"
            ) from error
        raise
    return database
