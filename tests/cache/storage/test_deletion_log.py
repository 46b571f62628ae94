from __future__ import annotations

import time

import pytest

from agentspec.cache.deletion import select
from agentspec.cache.storage import deletion_log
from agentspec.cache.storage.database import Database
from agentspec.cache.storage.schema import deletions
from agentspec.types import Namespace


def test_the_log_grows_no_more_than_it_must(database: Database | None) -> None:
    """A process that has not looked for long takes anything to be deleted, and nobody else does."""
    if database is None:
        pytest.skip("memory has no log")
    for number in range(3):
        with database.writing() as connection:
            rows = [{"created_at": time.time(), "tenant": "x", "searched": False}] * 900
            connection.execute(deletions.insert(), rows)
            last = deletion_log.delete_rows(connection, select(session="s"), []).number
            logged = deletion_log.since(connection, 0)
            assert (len(logged), logged[-1][0]) == (1001 if number else 901, last)
            asks = [number for number, scope in logged if scope.searched and scope.concerns(Namespace("any"))]
            assert asks == ([logged[0][0]] if number else [])
            assert [number for number, _ in deletion_log.since(connection, last - 2)] == [last - 1, last]
