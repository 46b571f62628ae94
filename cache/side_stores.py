"""What a cache stores besides its sequences: answers of the Responses API, and what agents' turns taught.

It lies in `state.sqlite3` of the cache's folder, in memory, or in the cache's PostgreSQL database.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from agentspec.cache.deletion import ContentFilter, Scope, Selection, pause_between_looks
from agentspec.cache.storage import deletion_log
from agentspec.cache.storage.database import FAILURES, Database, PendingErasure, reason, write_rows
from agentspec.cache.storage.opening import prepare
from agentspec.cache.storage.schema import Kinds, is_older, is_sound, responses, tool_turns
from agentspec.cache.storage.sqlite import STATE, MemoryDatabase, SqliteDatabase
from agentspec.cache.stored import (
    LARGEST_TURN,
    MOST_UNPACKED,
    StoredResponse,
    StoredTurn,
    StoreLimits,
    packed,
    texts_of,
    unpacked,
)
from agentspec.errors import CacheDamagedError, CacheError, CacheFormatError, CacheUnavailableError

if TYPE_CHECKING:
    from agentspec.cache.storage.sequence_store import SequenceStore

_log = logging.getLogger(__name__)

_ROW = 512  # bytes that a row takes besides its body
_STEP = 64  # the bounds are checked each time that a process has added 1/64 of them
_ROOM = 16  # then 1/16 of a bound is made free, so that several processes together stay within it
_LOOK_SECONDS = 600.0  # between two looks for what is too old, at most
_WAITING = 4096  # turns that may wait while the database cannot be written
_MOST_TURNS = 4000  # of an agent; then the older half goes
_TOOL_TURN_BYTES = 32 << 20

_KINDS: Kinds = (
    *((name, str) for name in ("id", "tenant")),
    ("session", str | None),
    ("created_at", float | int),
    ("body", bytes),
)


class SideStore:
    """One table, whose rows age, are forgotten with the rest of the cache, and take at most so many bytes: of more, the
    oldest of the tenant that has most go. Blocking and thread-safe.

    All methods raise `CacheError` if the database cannot be used.
    """

    table: sa.Table
    largest: int  # bytes of a body; one that says it is larger is damaged

    def __init__(self, state: State, limits: StoreLimits) -> None:
        self.generation = 0  # changes when this process deletes rows
        self.limits = limits
        self._state = state
        self._database = state.database
        self._lock = threading.Lock()
        self._added = limits.total  # bytes since the bounds were checked: the first row checks them
        self._look_at = time.monotonic()

    def forget_within(self, connection: sa.Connection, selection: Selection) -> int:
        """Delete what the selection covers in the caller's transaction, which erases it."""
        columns = self.table.c
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
        old = is_older(self.table.c.created_at, self.limits.oldest)
        with self._reading() as connection:
            found = connection.execute(sa.select(self.table.c.id).where(old).limit(1)).first() is not None
        if found:
            with self._writing() as connection:
                self._delete_where(connection, old)

    def _texts(self, body: bytes) -> Iterable[str]:
        """What is searched for a text to forget. Raises `CacheFormatError` for a damaged body."""
        raise NotImplementedError

    def _is_covered(self, selection: Selection, row: Any) -> bool:
        """Whether a deletion takes a row with it. Rows have no tokenizer: one that is named excludes none."""
        if not is_sound(row, _KINDS):
            return True  # it cannot be searched, and is of no use
        if not selection.scope.covers(row.session, row.created_at):
            return False
        try:
            return not selection.searched or selection.is_in(self._texts(row.body))
        except CacheFormatError:
            return True

    @contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        with self._named(), self._database.engine.connect() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[sa.Connection]:
        """A write transaction, committed at the end; what it deletes is erased later."""
        before = self.generation
        try:
            with self._named(), self._database.writing() as connection:
                yield connection
        finally:
            if self.generation != before:
                self._state.erasure.mark()

    @contextmanager
    def _named(self) -> Iterator[None]:
        what = f"{self.table.name} in {self._database.name}"
        try:
            yield
        except FAILURES as error:
            if self._database.is_refusal(error):
                raise CacheError(f"{what} cannot hold this: {reason(error)}") from error
            raise CacheUnavailableError(f"{what} cannot be used now: {reason(error)}") from error

    def _delete(self, connection: sa.Connection, ids: Sequence[str]) -> int:
        if ids:
            connection.execute(
                self.table.delete().where(self.table.c.id == sa.bindparam("old")), [{"old": id} for id in ids]
            )
            self.generation += 1
        return len(ids)

    def _delete_where(self, connection: sa.Connection, *conditions: sa.ColumnElement[bool]) -> int:
        count = connection.execute(self.table.delete().where(*conditions)).rowcount
        self.generation += count > 0
        return count

    # Bounds.

    def _enforce_bounds(self, connection: sa.Connection, added: int) -> None:
        """Called in a transaction that adds so many bytes."""
        limits, columns = self.limits, self.table.c
        with self._lock:
            self._added += added
            if self._added < limits.smallest // _STEP:
                return
            self._added = 0
        self._delete_where(connection, is_older(columns.created_at, limits.oldest))
        self._delete_where(connection, sa.not_(columns.size.between(0, self.largest)))  # damaged
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


class ResponseStore(SideStore):
    """Stored answers."""

    table, largest = responses, MOST_UNPACKED

    def put(self, stored: StoredResponse) -> bool:
        """Store an answer; returns on commit. False if it is too large, if a pattern refuses its text, if it was
        forgotten meanwhile, or if another tenant has one of that id.
        """
        body, state = packed(stored), self._state
        if body is None or _ROW + len(body) > self.limits.smallest // 8:  # it would push out too many others
            return False
        if any(map(state.refuses, self._texts(body))):
            return False
        with self._writing() as connection:
            # What another process, or this one, deleted while the answer waited here must not come back.
            deletions = deletion_log.since(connection, state.history.known(stored.since))
            if _is_forgotten(stored, deletions, state.history.known(stored.created_at)):
                return False
            connection.execute(
                responses.delete().where(responses.c.id == stored.id, responses.c.tenant == stored.tenant)
            )
            names = ("id", "tenant", "session", "created_at", "previous", "backend")
            row = {name: getattr(stored, name) for name in names} | {"size": len(body), "body": body}
            insert = self._database.insert(responses).values(**row).on_conflict_do_nothing(index_elements=["id"])
            if connection.execute(insert.returning(responses.c.id)).first() is None:
                return False
            self._enforce_bounds(connection, len(body) + _ROW)
        return True

    def get(self, tenant: str, id: str) -> StoredResponse | None:
        """The tenant's answer of that id; None if there is none or it is too old."""
        with self._reading() as connection:
            row = connection.execute(sa.select(responses).where(*self._mine(tenant, id))).first()
        if row is None:
            return None
        if not is_sound(row, (*_KINDS, ("previous", str | None), ("backend", str | None))):
            raise CacheFormatError(f"the stored response {id} is damaged")
        head = (row.id, row.tenant, row.created_at, row.session, row.previous, row.backend)
        return StoredResponse(*head, **unpacked(row.body, row.id))

    def delete(self, tenant: str, id: str) -> bool:
        """Delete the tenant's answer of that id; returns whether there was one."""
        with self._writing() as connection:
            return self._delete_where(connection, *self._mine(tenant, id)) > 0

    def _mine(self, tenant: str, id: str) -> list[sa.ColumnElement[bool]]:
        return [responses.c.id == id, responses.c.tenant == tenant, responses.c.created_at >= self.limits.oldest]

    def _texts(self, body: bytes) -> Iterable[str]:
        return texts_of(unpacked(body, ""))


class ToolTurnStore(SideStore):
    """What agents' turns taught. Turns that are put wait in memory for the next `maintain`, and count as stored."""

    table, largest = tool_turns, 4 * LARGEST_TURN

    def __init__(self, state: State, limits: StoreLimits) -> None:
        super().__init__(state, limits)
        self._flushing = threading.Lock()  # taken before the other, and by one writer at a time
        self._waiting: dict[str, tuple[StoredTurn, int]] = {}  # with the last deletion that was known when it came

    def put(self, turn: StoredTurn) -> bool:
        """Store a turn; returns at once, and what is put becomes durable soon after. False if it is refused."""
        if self._database.closed or len(turn.body.encode("utf-8", "replace")) > LARGEST_TURN:
            return False
        if self._state.refuses(turn.body):
            return False
        with self._lock:
            self._waiting[turn.id] = turn, self._state.history.last
            while len(self._waiting) > _WAITING:
                del self._waiting[next(iter(self._waiting))]
        return True

    def ids(self, tenant: str, agent: str) -> list[str]:
        waiting = self._waiting_of(tenant, agent)  # before the database: what is written meanwhile is found in either
        with self._reading() as connection:
            query = sa.select(tool_turns.c.id).where(*_of(tenant, agent))
            found = connection.execute(query.order_by(tool_turns.c.created_at, tool_turns.c.id)).scalars().all()
        return list(dict.fromkeys([*found, *waiting]))

    def read(self, tenant: str, agent: str, ids: Sequence[str]) -> list[StoredTurn]:
        """Those of the agent's turns that have these ids, oldest first. Damaged ones are logged and left out."""
        known = self._waiting_of(tenant, agent)
        with self._reading() as connection:
            rows = connection.execute(sa.select(tool_turns).where(*_of(tenant, agent), tool_turns.c.id.in_(ids))).all()
        known |= {turn.id: turn for row in rows if (turn := self._turn(row))}
        return [known[id] for id in ids if id in known]

    def forget_within(self, connection: sa.Connection, selection: Selection) -> int:
        with self._lock:
            waiting = [turn for turn, _ in self._waiting.values()]
            covered = {turn.id for turn in waiting if _covers(selection, turn)}
            self._waiting = {id: waits for id, waits in self._waiting.items() if id not in covered}
        self.generation += bool(covered)
        return len(covered) + super().forget_within(connection, selection)

    def maintain(self) -> None:
        """Called periodically: write what waits, and delete what is too old."""
        self.flush()
        super().maintain()

    def flush(self) -> None:
        """Write what waits, in one transaction."""
        with self._flushing:
            if not self._waiting:
                return
            with self._writing() as connection:
                with self._lock:  # what is forgotten from now on is forgotten in a later transaction
                    waiting = list(self._waiting.values())
                # What a process, perhaps another, has forgotten since: they waited where it cannot see.
                deletions = deletion_log.since(connection, min(known for _, known in waiting))
                rows = [_row(turn) for turn, known in waiting if not _is_forgotten(turn, deletions, known)]
                insert = self._database.insert(tool_turns).on_conflict_do_nothing(index_elements=["id"])
                write_rows(self._database, connection, insert, rows)
                self.generation += len(rows) < len(waiting)
                self._halve_agents(connection, rows)
                self._enforce_bounds(connection, sum(len(row["body"]) + _ROW for row in rows))
            with self._lock:
                for turn, _ in waiting:
                    self._waiting.pop(turn.id, None)

    def _halve_agents(self, connection: sa.Connection, rows: Iterable[dict[str, Any]]) -> None:
        """Delete the older half of the turns of each agent of these that has too many."""
        for tenant, agent in {(row["tenant"], row["agent"]) for row in rows}:
            mine = _of(tenant, agent)
            count = connection.execute(sa.select(sa.func.count()).where(*mine)).scalar_one()
            if count > _MOST_TURNS:
                older = sa.select(tool_turns.c.id).where(*mine).order_by(tool_turns.c.created_at, tool_turns.c.id)
                self._delete(connection, connection.execute(older.limit((count + 1) // 2)).scalars().all())

    def _waiting_of(self, tenant: str, agent: str) -> dict[str, StoredTurn]:
        with self._lock:
            waiting = [turn for turn, _ in self._waiting.values()]
        return {turn.id: turn for turn in waiting if (turn.tenant, turn.agent) == (tenant, agent)}

    def _turn(self, row: sa.Row[Any]) -> StoredTurn | None:
        """The turn of a row; None if it is damaged, which is logged."""
        try:
            if not is_sound(row, _KINDS):
                raise CacheFormatError("a value is not of its column's type")
            [body] = self._texts(row.body)
            return StoredTurn(row.id, row.tenant, row.agent, row.session, row.created_at, body)
        except CacheFormatError as error:
            _log.warning("what was learned about tools is damaged (turn %s) and left out: %s", row.id, error)
            return None

    def _texts(self, body: bytes) -> list[str]:
        try:
            return [zlib.decompressobj().decompress(body, 4 * LARGEST_TURN).decode()]
        except (zlib.error, ValueError) as error:
            raise CacheFormatError(str(error)) from None


def _of(tenant: str, agent: str) -> tuple[sa.ColumnElement[bool], ...]:
    return tool_turns.c.tenant == tenant, tool_turns.c.agent == agent


def _row(turn: StoredTurn) -> dict[str, Any]:
    body = zlib.compress(turn.body.encode("utf-8", "replace"), 3)
    names = ("id", "tenant", "agent", "session", "created_at")
    return {name: getattr(turn, name) for name in names} | {"size": len(body), "body": body}


def _covers(selection: Selection, turn: StoredTurn) -> bool:
    if selection.tenant not in (None, turn.tenant):
        return False
    return selection.scope.covers(turn.session, turn.created_at) and selection.is_in([turn.body])


def _is_forgotten(stored: StoredResponse | StoredTurn, deletions: Iterable[tuple[int, Scope]], whole: int) -> bool:
    """Whether one of the deletions since it was begun takes along what is about to be stored.

    It does by tenant and session. A search is in what was whole when it ran, before which deletion `whole` was the
    last: what it looked for is known to no one any more, so that all of that goes.
    """
    return any(
        (number > whole or (isinstance(stored, StoredResponse) and not scope.searched))
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
        retention: float | None = None,
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
        most = min(_TOOL_TURN_BYTES, limits.total // 2)
        self.responses = ResponseStore(self, limits)
        self.tool_turns = ToolTurnStore(self, StoreLimits(most, min(most, limits.tenant or most), retention))
        if store is not None and self._is_shared:
            store.also_forgets.append(self._forget_within)

    def forget(self, selection: Selection) -> None:
        """Delete and erase what the selection covers. In a shared database the deletion of the sequences does so.

        Raises `CacheError` where the database cannot be changed; nothing is deleted then.
        """
        if self._is_shared:
            return
        try:
            with self.database.writing() as connection:
                deletion_log.log(connection, selection.scope)
                gone = self._forget_within(connection, selection)
        except FAILURES as error:
            raise CacheError(f"{self.database.name} cannot be changed: {reason(error)}") from error
        if gone:
            self.erasure.mark(rewrite=True)
            self.erasure.finish(now=True)

    def _forget_within(self, connection: sa.Connection, selection: Selection) -> int:
        return sum(store.forget_within(connection, selection) for store in (self.responses, self.tool_turns))

    def note_deletions(self) -> None:
        """What is stored from now on came after the deletions of before."""
        with suppress(*FAILURES), self.database.engine.connect() as connection:  # else they count as later ones
            self.history.note(deletion_log.last(connection))

    def maintain(self) -> None:
        """Delete what is too old or too much, in each store whatever fails in others. To be called now and then."""
        with ExitStack() as done:
            done.callback(self.erasure.finish)
            done.callback(self.note_deletions)
            done.callback(self.responses.maintain)
            done.callback(self.tool_turns.maintain)

    def close(self) -> None:
        """Write what waits, and release the database. Idempotent."""
        with ExitStack() as released:
            if not self._is_shared:
                released.callback(self.database.close)
            self.tool_turns.flush()


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
                f"{database.name}, which holds stored responses and what turns of agents taught, is damaged:"
                f" {reason(error)}; stop what uses it, and restore a backup, or move it away, which forgets them all"
            ) from error
        raise
    return database
