"""The log of deletions, which grows as long as there is a database."""

from __future__ import annotations

from typing import Any

import pytest

from agentspec.cache.storage import deletion_log
from agentspec.cache.storage.database import Database
from agentspec.cache.storage.schema import deletions
from agentspec.cache.storage.sqlite import SqliteDatabase


def test_of_a_long_log_only_the_newest_are_read(database: Database | None) -> None:
    if database is None:
        pytest.skip("memory has no log")
    times = [*map(float, range(2000)), 1e6, 1e6 - 60, 1e6 + 5]  # of clocks that differ
    with database.writing() as connection:
        connection.execute(deletions.insert(), [{"created_at": at, "salt": "", "searched": False} for at in times])
    steps = [0]  # tens of SQLite's instructions
    with database.engine.connect() as connection:
        if isinstance(database, SqliteDatabase):
            driver: Any = connection.connection.driver_connection
            driver.set_progress_handler(lambda: steps.append(1), 10)
        found = deletion_log.after(connection, 1e6)
    assert sorted(at for at, _ in found) == [1e6, 1e6 + 5]
    assert len(steps) < 200  # a look at all rows takes more than 10,000 instructions
