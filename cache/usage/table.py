"""Usage in the cache's database, to which all processes that use it add."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from agentspec.cache.deletion import Selection
from agentspec.cache.storage import deletion_log
from agentspec.cache.storage.database import Database
from agentspec.cache.storage.rows.side_table import SideTable
from agentspec.cache.storage.schema import Kinds, Name, is_sound, keep_no_statistics
from agentspec.cache.usage.row import (
    BATCH_SECONDS,
    COUNTS,
    LOOK_SECONDS,
    Owner,
    UsageRow,
    forgets_tenant,
    last_day,
    oldest_day,
)

_NAMES = ("day", "tenant", "key", "model")

_metadata = sa.MetaData()
usage = sa.Table(
    "usage",
    _metadata,
    sa.Column("day", sa.String(10), primary_key=True),  # UTC, as 2026-11-23
    *(sa.Column(name, Name, primary_key=True) for name in _NAMES[1:]),
    *(sa.Column(name, sa.BigInteger, nullable=False) for name in COUNTS),
)
keep_no_statistics(usage, "tenant", "key", "model")

batches = sa.Table(
    "usage_batches",
    _metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("stored", sa.Float, nullable=False),  # seconds since 1970
)

_KINDS: Kinds = (*((name, str) for name in _NAMES), *((name, int) for name in COUNTS))
_TOKENS = usage.c.prompt_tokens + usage.c.completion_tokens + usage.c.estimated_tokens


class DatabaseUsage:
    """A `UsageStore` in a database."""

    def __init__(self, database: Database, days: int) -> None:
        self._table = SideTable(database, usage, "usage")
        self._batches = SideTable(database, batches, "usage")  # which a database of an older version lacks
        self._days = days
        self._look_at = time.monotonic()

    def add(self, rows: Sequence[UsageRow], *, since: float, day: str, batch: str | None = None) -> Mapping[Owner, int]:
        if not rows:
            with self._table.reading() as connection:
                return {} if connection is None else _totals(connection, day)
        with self._table.writing() as connection:
            self._table.create(connection)
            if batch is not None and not self._first(connection, batch):
                return _totals(connection, day)
            forgotten = [scope for _, scope in deletion_log.after(connection, since)]
            kept = [row for row in rows if not any(forgets_tenant(scope, row.tenant) for scope in forgotten)]
            self._add(connection, kept)
            return _totals(connection, day)

    def read(
        self, *, tenant: str | None = None, model: str | None = None, since: str = "", until: str = "9999"
    ) -> list[UsageRow]:
        conditions: list[sa.ColumnElement[bool]] = [usage.c.day.between(since, until)]
        conditions += [usage.c.tenant == tenant] if tenant is not None else []
        conditions += [usage.c.model == model] if model is not None else []
        with self._table.reading() as connection:
            rows = connection.execute(sa.select(usage).where(*conditions)).all() if connection else []
        sound = [row for row in rows if is_sound(row, _KINDS)]
        return sorted(
            (UsageRow(**{name: getattr(row, name) for name in (*_NAMES, *COUNTS)}) for row in sound),
            key=lambda row: (row.day, row.tenant, row.key, row.model),
        )

    def forget(self, selection: Selection) -> int:
        """Delete what the selection covers, in a transaction of its own."""
        with self._table.changing() as connection:
            return 0 if connection is None else self.forget_within(connection, selection)

    def forget_within(self, connection: sa.Connection, selection: Selection) -> int:
        """The same in the caller's transaction, which erases what is deleted."""
        last = last_day(selection)
        if last is None or not self._table.is_there(connection):
            return 0
        return self._table.delete_where(connection, usage.c.tenant == selection.tenant, usage.c.day <= last)

    def maintain(self) -> None:
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS
            self._delete_old()
            with self._batches.changing() as changing:
                if changing is not None:
                    self._batches.delete_where(changing, batches.c.stored < time.time() - BATCH_SECONDS)
        self._table.erase()

    def _delete_old(self) -> None:
        old = usage.c.day < oldest_day(time.time(), self._days)
        with self._table.reading() as connection:
            found = connection is not None and connection.execute(sa.select(usage.c.day).where(old).limit(1)).first()
        if not found:
            return
        with self._table.changing() as changing:
            if changing is not None:
                self._table.delete_where(changing, old)

    def _first(self, connection: sa.Connection, batch: str) -> bool:
        """Note that a batch is stored; False if it was before. One that is just being stored is waited for."""
        self._batches.create(connection)
        insert = self._batches.database.insert(batches).values(id=batch, stored=time.time())
        # Not by `rowcount`, which drivers need not tell of an insertion.
        return connection.execute(insert.on_conflict_do_nothing().returning(batches.c.id)).first() is not None

    def _add(self, connection: sa.Connection, rows: Sequence[UsageRow]) -> None:
        insert = self._table.database.insert(usage)
        sums = {name: usage.c[name] + insert.excluded[name] for name in COUNTS}
        added = insert.on_conflict_do_update(index_elements=list(_NAMES), set_=sums)
        columns = (*_NAMES, *COUNTS)
        self._table.rows.execute(connection, added, [{name: getattr(row, name) for name in columns} for row in rows])


def _totals(connection: sa.Connection, day: str) -> dict[Owner, int]:
    owner = (usage.c.tenant, usage.c.key)
    query = sa.select(*owner, sa.func.sum(_TOKENS)).where(usage.c.day == day).group_by(*owner)
    return {(tenant, key): int(tokens) for tenant, key, tokens in connection.execute(query)}
