"""Stored answers in the cache's database, which all processes that use it share."""

from __future__ import annotations

import threading
import time
from typing import Any

import sqlalchemy as sa

from agentspec.cache.deletion import Selection, pause_between_looks
from agentspec.cache.responses.stored import (
    MOST_UNPACKED,
    ROW,
    Refuses,
    ResponseLimits,
    StoredResponse,
    admitted,
    covers,
    unpacked,
)
from agentspec.cache.storage import deletion_log
from agentspec.cache.storage.database import Database
from agentspec.cache.storage.rows.side_table import SideTable
from agentspec.cache.storage.schema import Kinds, Name, is_older, is_sound, keep_no_statistics
from agentspec.errors import CacheFormatError

_STEP = 64  # the bounds are checked each time that a process has added 1/64 of them
_ROOM = 16  # then 1/16 of a bound is made free, so that several processes together stay within it
_EXPIRY_SECONDS = 600.0  # between two looks for what is too old, at most

_metadata = sa.MetaData()
responses = sa.Table(
    "responses",
    _metadata,
    sa.Column("id", Name(128), primary_key=True),
    sa.Column("tenant", Name, nullable=False),
    sa.Column("session", Name),
    sa.Column("created_at", sa.Float, nullable=False, index=True),  # seconds since 1970
    sa.Column("previous", Name(128)),
    sa.Column("backend", sa.String),
    sa.Column("size", sa.Integer, nullable=False),  # bytes of `body`
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Index("ix_responses_tenant", "tenant", "created_at", "size"),  # covers the sums of the bounds
)
keep_no_statistics(responses, "tenant", "session", "body")

_KINDS: Kinds = (
    ("id", str),
    ("tenant", str),
    ("session", str | None),
    ("created_at", float | int),
    ("body", bytes),
)
_FURTHER: Kinds = (("previous", str | None), ("backend", str | None))


class ResponseStore:
    """Stored answers that age, and are forgotten with the rest of the cache. Blocking and thread-safe.

    All methods raise `CacheError` if the database cannot be used.
    """

    def __init__(
        self,
        database: Database,
        limits: ResponseLimits,
        refuses: Refuses | None = None,
        history: deletion_log.KnownDeletions | None = None,
    ) -> None:
        self._table = SideTable(database, responses, "stored responses")
        self._limits = limits
        self._refuses = refuses
        self._history = history or deletion_log.KnownDeletions()
        self._lock = threading.Lock()
        self._added = limits.total  # bytes since the bounds were checked: the first answer checks them
        self._expires_at = time.monotonic()

    def put(self, stored: StoredResponse) -> bool:
        """Store an answer; returns on commit. False if it is too large, if a pattern refuses its text, if it was
        forgotten meanwhile, or if another tenant has one of that id.
        """
        body = admitted(stored, self._limits, self._refuses)
        if body is None:
            return False
        with self._table.writing() as connection:
            # What another process, or this one, deleted while the answer waited here must not come back.
            deletions = deletion_log.since(connection, self._history.known(stored.since))
            if stored.is_forgotten(deletions, self._history.known(stored.created_at)):
                return False
            self._table.create(connection)
            names = ("id", "tenant", "session", "created_at", "previous", "backend")
            row = {name: getattr(stored, name) for name in names} | {"size": len(body), "body": body}
            mine = (responses.c.id == stored.id, responses.c.tenant == stored.tenant)
            connection.execute(responses.delete().where(*mine))
            insert = self._table.database.insert(responses).values(**row).on_conflict_do_nothing(index_elements=["id"])
            if connection.execute(insert).rowcount == 0:
                return False
            self._keep_bounds(connection, len(body) + ROW)
        return True

    def get(self, tenant: str, id: str) -> StoredResponse | None:
        """The tenant's answer of that id; None if there is none or it is too old."""
        with self._table.reading() as connection:
            row = (
                connection.execute(sa.select(responses).where(*self._mine(tenant, id))).first() if connection else None
            )
        if row is None:
            return None
        if not is_sound(row, (*_KINDS, *_FURTHER)):
            raise CacheFormatError(f"the stored response {id} is damaged")
        head = (row.id, row.tenant, row.created_at, row.session, row.previous, row.backend)
        return StoredResponse(*head, **unpacked(row.body, row.id))

    def delete(self, tenant: str, id: str) -> bool:
        """Delete the tenant's answer of that id; returns whether there was one."""
        with self._table.changing() as connection:
            if connection is None:
                return False
            return self._table.delete_where(connection, *self._mine(tenant, id)) > 0

    def forget(self, selection: Selection) -> int:
        """Delete what the selection covers, in a transaction of its own."""
        with self._table.changing() as connection:
            return 0 if connection is None else self.forget_within(connection, selection)

    def forget_within(self, connection: sa.Connection, selection: Selection) -> int:
        """The same in the caller's transaction, which erases what is deleted."""
        if not self._table.is_there(connection):
            return 0
        body = responses.c.body if selection.searched else sa.literal(b"").label("body")
        columns: list[sa.ColumnElement[Any]] = [responses.c[name] for name in ("id", "tenant", "session", "created_at")]
        query = sa.select(*columns, body)
        if selection.tenant is not None:
            query = query.where(responses.c.tenant == selection.tenant)
        found: list[str] = []
        with connection.execute(query.execution_options(yield_per=64)) as rows:
            found += (row.id for row in rows if _is_covered(selection, row))
        self._table.delete(connection, found)
        return len(found)

    def maintain(self) -> None:
        """Called periodically: delete what is too old, and finish erasing what was deleted."""
        if self._limits.seconds is not None and time.monotonic() >= self._expires_at:
            self._expires_at = time.monotonic() + pause_between_looks(self._limits.seconds, _EXPIRY_SECONDS)
            self._expire()
        self._table.erase()

    def total_bytes(self) -> int:
        """The bytes of all answers."""
        with self._table.reading() as connection:
            taken = sa.select(sa.func.sum(responses.c.size + ROW))
            return int(connection.execute(taken).scalar() or 0) if connection else 0

    def _expire(self) -> None:
        with self._table.reading() as connection:
            query = sa.select(responses.c.id).where(is_older(responses.c.created_at, self._limits.oldest)).limit(1)
            old = connection is not None and connection.execute(query).first() is not None
        if not old:
            return
        with self._table.changing() as changing:
            if changing is not None:
                self._delete_old(changing)

    def _delete_old(self, connection: sa.Connection) -> None:
        self._table.delete_where(connection, is_older(responses.c.created_at, self._limits.oldest))

    def _mine(self, tenant: str, id: str) -> list[sa.ColumnElement[bool]]:
        return [responses.c.id == id, responses.c.tenant == tenant, responses.c.created_at >= self._limits.oldest]

    def _keep_bounds(self, connection: sa.Connection, added: int) -> None:
        limits = self._limits
        smallest = limits.total if limits.tenant is None else min(limits.total, limits.tenant)
        with self._lock:
            self._added += added
            if self._added < smallest // _STEP:
                return
            self._added = 0
        self._delete_old(connection)
        self._table.delete_where(connection, sa.not_(responses.c.size.between(0, MOST_UNPACKED)))  # damaged
        taken = sa.func.sum(responses.c.size + ROW)
        rows = connection.execute(sa.select(responses.c.tenant, taken).group_by(responses.c.tenant)).all()
        by_tenant = {tenant: int(size) for tenant, size in rows}
        if limits.tenant is not None:
            for tenant, size in by_tenant.items():
                if size > limits.tenant - limits.tenant // _ROOM:
                    by_tenant[tenant] -= self._delete_oldest(connection, tenant, size - limits.tenant * 7 // 8)
        room = limits.total // _ROOM
        while by_tenant and (excess := sum(by_tenant.values()) - limits.total + room) > 0:
            tenant = max(by_tenant, key=lambda name: by_tenant[name])
            # Half of the excess at a time: another tenant may take most by then.
            freed = self._delete_oldest(connection, tenant, max(excess // 2, room // 2))
            by_tenant[tenant] -= freed
            if not freed:  # a damaged name, of which nothing is found: the others give
                del by_tenant[tenant]

    def _delete_oldest(self, connection: sa.Connection, tenant: str, size: int) -> int:
        """Delete the tenant's oldest answers, of at least `size` bytes together; returns how many bytes."""
        theirs = responses.c.tenant == tenant
        query = sa.select(responses.c.id, responses.c.size).where(theirs).order_by(responses.c.created_at)
        chosen: list[str] = []
        freed = 0
        with connection.execute(query.execution_options(yield_per=256)) as rows:
            for row in rows:
                chosen.append(row.id)
                freed += row.size + ROW
                if freed >= size:
                    break
        self._table.delete(connection, chosen)
        return freed


def _is_covered(selection: Selection, row: Any) -> bool:
    if not is_sound(row, _KINDS):
        return True  # it cannot be searched, and is of no use
    return covers(selection, row.tenant, row.session, row.created_at, row.body)
