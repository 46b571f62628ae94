"""Usage in a database whose sequences the process does not need: nothing else of it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from agentspec.cache.storage.connection import opening
from agentspec.cache.storage.database import Database
from agentspec.cache.storage.tables import prepare
from agentspec.cache.usage.row import Owner, UsageRow
from agentspec.cache.usage.table import DatabaseUsage
from agentspec.errors import CacheError


class UsageAlone(DatabaseUsage):
    """A `UsageStore` with a database of its own, which it maintains as it is added to. Open it with `open`."""

    def __init__(self, database: Database, days: int) -> None:
        super().__init__(database, days)
        self._database = database

    @classmethod
    def open(cls, target: str | Path, days: int) -> UsageAlone:
        """Open the database at `target`, a folder or an address. Raises as a follower's `SequenceStore.open`."""
        with opening(target) as database:
            database.connect()
            prepare(database)
            return cls(database, days)

    def add(self, rows: Sequence[UsageRow], *, since: float, day: str, batch: str | None = None) -> Mapping[Owner, int]:
        stored = super().add(rows, since=since, day=day, batch=batch)
        with suppress(CacheError):  # the rows are committed: who is told otherwise adds them again
            self.maintain()
        return stored

    def close(self) -> None:
        self._database.close()
