"""Turns in the cache's database, which all processes that use it share."""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import sqlalchemy as sa

from agentspec.cache.deletion import Selection, pause_between_looks
from agentspec.cache.storage import deletion_log
from agentspec.cache.storage.database import Database
from agentspec.cache.storage.rows.side_table import SideTable
from agentspec.cache.storage.schema import Kinds, Name, is_older, is_sound, keep_no_statistics
from agentspec.cache.tool_turns.turn import LARGEST, MOST, ROW, StoredTurn, is_covered
from agentspec.errors import CacheClosedError, CacheFormatError

_log = logging.getLogger(__name__)

_WAITING = 4096  # turns that may wait while the database cannot be written
_LOOK_SECONDS = 600.0  # between two looks for what is too old or too much, at most

_metadata = sa.MetaData()
tool_turns = sa.Table(
    "tool_turns",
    _metadata,
    sa.Column("id", sa.String(24), primary_key=True),
    sa.Column("tenant", Name, nullable=False),
    sa.Column("agent", Name, nullable=False),
    sa.Column("session", Name, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False, index=True),  # seconds since 1970
    sa.Column("size", sa.Integer, nullable=False),  # bytes of `body`
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Index("ix_tool_turns_agent", "tenant", "agent", "created_at", "size"),
)
keep_no_statistics(tool_turns, "tenant", "agent", "session", "body")

_KINDS: Kinds = (
    *((name, str) for name in ("id", "tenant", "agent", "session")),
    ("created_at", float | int),
    ("body", bytes),
)
_ORDER = (tool_turns.c.created_at, tool_turns.c.id)


class ToolTurnStore:
    """Stored turns. Thread-safe. Methods raise `CacheError` if the database cannot be used.

    Turns that are put wait in memory for the next `maintain`, and count as stored meanwhile. At most `total` bytes are
    kept, `tenant` of one tenant; of more, the oldest of the tenant that has most go.
    """

    def __init__(
        self,
        database: Database,
        refuses: Callable[[str], bool] | None,
        seconds: float | None,
        total: int,
        tenant: int,
        history: deletion_log.KnownDeletions | None = None,
    ) -> None:
        self._table = SideTable(database, tool_turns, "what was learned about tools")
        self._refuses = refuses
        self._seconds = seconds
        self._total, self._tenant = total, tenant
        self._lock = threading.Lock()  # of what waits
        self._writing = threading.Lock()  # taken before the other, and by one writer at a time
        self._waiting: dict[str, StoredTurn] = {}  # counted as stored
        self._history = history or deletion_log.KnownDeletions()
        self._known: dict[str, int] = {}  # the last deletion that was known when each came
        self._look_at = time.monotonic()
        self._added = 0  # bytes since the last look
        self._closed = False
        self.generation = 0  # changes when this process deletes turns

    def put(self, turn: StoredTurn) -> bool:
        """Keep a turn; returns at once, and what is kept becomes durable soon after. False if it is refused."""
        if self._closed or turn.size > LARGEST or (self._refuses is not None and self._refuses(turn.body)):
            return False
        with self._lock:
            self._waiting[turn.id] = turn
            self._known[turn.id] = self._history.last
            while len(self._waiting) > _WAITING:
                del self._waiting[next(iter(self._waiting))]
        return True

    def ids(self, tenant: str, agent: str) -> list[str]:
        """The ids of all turns of an agent, oldest first."""
        theirs = (tool_turns.c.tenant == tenant, tool_turns.c.agent == agent)
        with self._lock:  # before the database: what is written meanwhile is found in either place
            waiting = [one.id for one in self._waiting.values() if (one.tenant, one.agent) == (tenant, agent)]
        with self._opened().reading() as connection:
            query = sa.select(tool_turns.c.id).where(*theirs).order_by(*_ORDER)
            found = list(connection.execute(query).scalars()) if connection else []
        stored = set(found)
        return found + [id for id in waiting if id not in stored]

    def read(self, tenant: str, agent: str, ids: Sequence[str]) -> list[StoredTurn]:
        """Those of the agent's turns that have these ids, oldest first. Damaged ones are logged and left out."""
        with self._lock:
            asked = [self._waiting[id] for id in ids if id in self._waiting]
        waiting = {one.id: one for one in asked if (one.tenant, one.agent) == (tenant, agent)}
        found: dict[str, StoredTurn] = {}
        with self._opened().reading() as connection:
            mine = sa.select(tool_turns).where(tool_turns.c.tenant == tenant, tool_turns.c.agent == agent)
            for batch in self._table.in_batches(ids) if connection else ():
                assert connection is not None
                found |= {turn.id: turn for row in connection.execute(mine.where(batch)) for turn in _readable(row)}
        known = waiting | found
        return [known[id] for id in ids if id in known]

    def forget(self, selection: Selection) -> int:
        """Delete what the selection covers, in a transaction of its own."""
        with self._opened().writing() as connection:
            return self.forget_within(connection, selection)

    def forget_within(self, connection: sa.Connection, selection: Selection) -> int:
        """The same in the caller's transaction, which erases what is deleted."""
        with self._lock:
            covered = [id for id, turn in self._waiting.items() if is_covered(selection, turn)]
            for id in covered:
                del self._waiting[id]
        found: list[str] = []
        if self._table.is_there(connection):
            query = sa.select(tool_turns)
            if selection.tenant is not None:
                query = query.where(tool_turns.c.tenant == selection.tenant)
            with connection.execute(query.execution_options(yield_per=64)) as rows:
                found += (row.id for row in rows if _is_covered(selection, row))
            self._delete(connection, found)
        self.generation += bool(found or covered)
        return len({*found, *covered})

    def maintain(self) -> None:
        """Called periodically: write what waits, delete what is too old or too much, and finish erasing."""
        self._write()
        if time.monotonic() >= self._look_at or self._added > min(self._total, self._tenant) // 16:
            self._look_at, self._added = time.monotonic() + pause_between_looks(self._seconds, _LOOK_SECONDS), 0
            self._keep_bounds()
        self._table.erase()

    def flush(self) -> None:
        """Write what waits."""
        self._write()

    def close(self) -> None:
        """Write what waits. Nothing is kept or found afterwards."""
        try:
            self._write()
        finally:
            self._closed = True

    def leave_behind(self) -> None:
        """Called in a forked process, which keeps nothing."""
        self._closed = True
        self._waiting.clear()

    def _write(self) -> None:
        """Write what waits, in one transaction."""
        with self._writing:
            if not self._waiting:
                return
            with self._opened().writing() as connection:
                self._table.create(connection)
                with self._lock:  # what is forgotten from now on is forgotten in a later transaction
                    turns = list(self._waiting.values())
                rows = [_row(turn) for turn in _left(connection, turns, self._known)]
                insert = self._table.database.insert(tool_turns).on_conflict_do_nothing(index_elements=["id"])
                self._table.rows.execute(connection, insert, rows)
            self.generation += len(rows) < len(turns)
            with self._lock:
                for turn in turns:
                    self._waiting.pop(turn.id, None)
                self._known = {id: number for id, number in self._known.items() if id in self._waiting}
            self._added += sum(turn.size for turn in turns)

    def _keep_bounds(self) -> None:
        with self._opened().changing() as connection:
            if connection is None:
                return
            if self._seconds is not None:
                old = is_older(tool_turns.c.created_at, time.time() - self._seconds)
                self.generation += self._table.delete_where(connection, old) > 0
            damaged = sa.not_(tool_turns.c.size.between(0, 4 * LARGEST))
            self.generation += self._table.delete_where(connection, damaged) > 0
            columns = (tool_turns.c.tenant, tool_turns.c.agent)
            query = sa.select(*columns, sa.func.count(), sa.func.sum(tool_turns.c.size + ROW)).group_by(*columns)
            sizes: dict[tuple[str, str], int] = {}
            for tenant, agent, count, size in connection.execute(query).all():
                freed = self._delete_older_half(connection, tenant, agent) if count > MOST else 0
                sizes[tenant, agent] = int(size) - freed
            while sizes and (tenant := self._tenant_with_too_much(sizes)) is not None:
                largest = max((key for key in sizes if key[0] == tenant), key=lambda key: sizes[key])
                freed = self._delete_older_half(connection, *largest)
                sizes[largest] -= freed
                if not freed:
                    del sizes[largest]

    def _tenant_with_too_much(self, sizes: dict[tuple[str, str], int]) -> str | None:
        """The tenant that has most, with all its agents, if that or all together is too much."""
        tenants: Counter[str] = Counter()
        for (tenant, _), size in sizes.items():
            tenants[tenant] += size
        [(largest, size)] = tenants.most_common(1)
        return largest if tenants.total() > self._total or size > self._tenant else None

    def _delete_older_half(self, connection: sa.Connection, tenant: str, agent: str) -> int:
        """Delete the older half of an agent's turns; returns how many bytes."""
        theirs = (tool_turns.c.tenant == tenant, tool_turns.c.agent == agent)
        rows = connection.execute(sa.select(tool_turns.c.id, tool_turns.c.size).where(*theirs).order_by(*_ORDER)).all()
        older = rows[: (len(rows) + 1) // 2]
        self._delete(connection, [row.id for row in older])
        return sum(row.size + ROW for row in older)

    def _delete(self, connection: sa.Connection, ids: Sequence[str]) -> None:
        self._table.delete(connection, ids)
        self.generation += bool(ids)

    def _opened(self) -> SideTable:
        if self._closed:
            raise CacheClosedError("the cache that holds what was learned about tools is closed")
        return self._table


def _left(connection: sa.Connection, turns: Sequence[StoredTurn], known: Mapping[str, int]) -> list[StoredTurn]:
    """The turns without those that a process, perhaps another, has forgotten since: they waited where it cannot see.

    `known` is, by id, the last deletion of before.
    """
    deletions = deletion_log.since(connection, min((known[turn.id] for turn in turns), default=0))
    return [
        turn
        for turn in turns
        if not any(
            number > known[turn.id]
            and scope.concerns_tenant(turn.tenant)
            and scope.covers(turn.session, turn.created_at)
            for number, scope in deletions
        )
    ]


def _row(turn: StoredTurn) -> dict[str, object]:
    body = zlib.compress(turn.body.encode("utf-8", "replace"), 3)
    names = ("id", "tenant", "agent", "session", "created_at")
    return {name: getattr(turn, name) for name in names} | {"size": len(body), "body": body}


def _turn(row: sa.Row[tuple[object, ...]]) -> StoredTurn:
    """Raises `CacheFormatError` for a damaged row."""
    try:
        if not is_sound(row, _KINDS):
            raise ValueError
        body = zlib.decompressobj().decompress(row.body, 4 * LARGEST).decode()
    except (zlib.error, ValueError):
        raise CacheFormatError(f"what was learned about tools is damaged (turn {row.id})") from None
    return StoredTurn(row.id, row.tenant, row.agent, row.session, row.created_at, body)


def _readable(row: sa.Row[tuple[object, ...]]) -> list[StoredTurn]:
    """The turn of a row; none if it is damaged, which is logged."""
    try:
        return [_turn(row)]
    except CacheFormatError as error:
        _log.warning("%s: it is left out", error)
        return []


def _is_covered(selection: Selection, row: sa.Row[tuple[object, ...]]) -> bool:
    try:
        return is_covered(selection, _turn(row))
    except CacheFormatError:
        return True  # it cannot be searched, and is of no use
