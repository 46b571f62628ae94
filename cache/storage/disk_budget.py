"""Keeps a database within its budgets: a tenant over its limit loses only its own sequences, oldest first."""

from __future__ import annotations

import time

import sqlalchemy as sa

from agentspec.cache.storage.database import Database
from agentspec.cache.storage.schema import sequences
from agentspec.cache.storage.segments import SegmentFolder

_ROW = 512  # bytes that a sequence takes besides its tokens, in the table and in its indexes
_SHARE = 20  # measuring takes at most 1/20 of the time


class DiskBudget:
    """`limit` bounds the bytes of database and segments, `tenant_limit` the bytes of each tenant's sequences."""

    def __init__(
        self, database: Database, segments: SegmentFolder, limit: int | None, tenant_limit: int | None
    ) -> None:
        self.limit = limit
        self._database = database
        self._segments = segments
        self._tenant_limit = tenant_limit
        self._measured_until = 0.0

    def enforce(self) -> None:
        """If this process is the writer, delete sequences until the budgets hold. Raises `DBAPIError`."""
        if not self._database.is_writer:
            return
        if self._tenant_limit is not None and time.monotonic() >= self._measured_until:
            begun = time.monotonic()
            self._enforce_shares(self._tenant_limit)
            now = time.monotonic()
            self._measured_until = now + _SHARE * (now - begun)
        # Only the writer makes segments, so that there are no more of them than it knows.
        if self.limit is None or self._database.disk_bytes() + self._segments.known_bytes() <= self.limit:
            return
        if self._database.disk_bytes() + self._segments.total_bytes() > self.limit:
            self._segments.clear()  # segments go first: the database can restore them
            if self._database.disk_bytes() > self.limit:
                self._enforce_limit(self.limit)

    def _enforce_shares(self, limit: int) -> None:
        for tenant, taken in self._tenants():
            if taken > limit:
                self._delete_oldest(tenant, taken - limit + limit // 16)

    def _enforce_limit(self, limit: int) -> None:
        """Delete from the largest tenant, a part at a time, since a row's size in the file is only an estimate."""
        while self._database.shrink() and (excess := self._database.disk_bytes() - limit) > 0:
            tenants = self._tenants()
            # Of a tenant whose name is damaged nothing is found: then the next largest gives.
            if not any(self._delete_oldest(one, max(taken // 8, min(excess, taken // 2))) for one, taken in tenants):
                return

    def _tenants(self) -> list[tuple[str, int]]:
        """(tenant, bytes), the largest first."""
        tenant = sequences.c.tenant
        taken = sa.func.sum(sequences.c.size) + _ROW * sa.func.count()
        query = sa.select(tenant, taken).group_by(tenant).order_by(taken.desc())
        with self._database.engine.connect() as connection:
            return [(tenant, int(size)) for tenant, size in connection.execute(query)]

    def _delete_oldest(self, tenant: str, size: int) -> bool:
        """Delete about `size` bytes; false where another process has become the writer, or there is none."""
        theirs = sequences.c.tenant == tenant
        query = sa.select(sequences.c.id, sequences.c.size).where(theirs).order_by(sequences.c.id)
        with self._database.writing() as connection:
            if not self._database.confirm_writer(connection):
                return False
            last = 0
            with connection.execute(query.execution_options(yield_per=1024)) as rows:
                for row in rows:
                    last = row.id
                    size -= (row.size if isinstance(row.size, int) else 0) + _ROW  # SQLite keeps any value
                    if size <= 0:
                        break
            gone = connection.execute(sequences.delete().where(theirs, sequences.c.id <= last)).rowcount
            return gone > 0
