"""What is deleted is erased, whatever else goes on in the database meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from agentspec.cache.storage.rows.side_table import SideTable
from agentspec.cache.storage.sqlite import SqliteDatabase

notes = sa.Table("notes", sa.MetaData(), sa.Column("id", sa.String(8), primary_key=True))


class Erasing(SqliteDatabase):
    """Counts its erasures, during which something else may go on; they are told to succeed or not."""

    erasures = 0
    succeeds = True
    meanwhile: Callable[[], None] | None = None

    def secure_erase(self, *, rewrite: bool, tenants: object = None) -> bool:
        self.erasures += 1
        if self.meanwhile is not None:
            self.meanwhile()
        return self.succeeds


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Erasing]:
    opened = Erasing(tmp_path)
    opened.connect()
    yield opened
    opened.close()


@pytest.fixture
def table(database: Erasing) -> SideTable:
    """Of two rows, `a` and `b`."""
    made = SideTable(database, notes, "the notes")
    with made.writing() as connection:
        made.create(connection)
        connection.execute(notes.insert(), [{"id": "a"}, {"id": "b"}])
    return made


def delete(table: SideTable, id: str) -> None:
    with table.writing() as connection:
        table.delete(connection, [id])


def erased(database: Erasing, table: SideTable) -> int:
    """How many erasures are tried, when two are asked for."""
    before = database.erasures
    table.erase()
    table.erase()
    return database.erasures - before


def test_a_deletion_is_erased_once(database: Erasing, table: SideTable) -> None:
    assert erased(database, table) == 0
    delete(table, "a")
    database.succeeds = False
    assert erased(database, table) == 2
    database.succeeds = True
    assert erased(database, table) == 1
    with table.writing() as connection:
        assert table.delete_where(connection, notes.c.id == "b") == 1
    assert erased(database, table) == 1


def test_a_deletion_during_an_erasure_is_erased_by_the_next(database: Erasing, table: SideTable) -> None:
    def delete_another() -> None:
        database.meanwhile = None
        delete(table, "b")

    delete(table, "a")
    database.meanwhile = delete_another
    assert erased(database, table) == 2


def test_a_deletion_is_erased_after_its_commit(database: Erasing, table: SideTable) -> None:
    delete(table, "a")
    with table.writing() as connection:
        table.delete(connection, ["b"])
        table.erase()  # of the first; the other is not committed
    assert erased(database, table) == 1
