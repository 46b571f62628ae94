"""The interface of a database to the store; `cache/storage/sqlite.py` and `cache/storage/postgres.py` implement it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.dialects import postgresql, sqlite

Upsert = sqlite.Insert | postgresql.Insert


class Database(ABC):
    """One database, and this process's part in it. Thread-safe.

    `name` is for people to read and holds no password. `folder` is where its files lie, None for a server's.
    """

    name: str
    folder: Path | None
    engine: sa.Engine

    @abstractmethod
    def acquire_writer(self) -> None:
        """Become the writer until `close`. Raises `CacheLockedError`, naming the writer that there is."""

    @abstractmethod
    def connect(self) -> None:
        """Make sure that there is a database to connect to. Raises `OSError`, `DBAPIError` and `CacheFormatError`."""

    @property
    @abstractmethod
    def is_writer(self) -> bool:
        """Whether this process is the writer."""

    @abstractmethod
    def renew_lease(self) -> None:
        """Called every now and then: stay the writer, or be one again, if this process ever was."""

    @abstractmethod
    def writing(self) -> AbstractContextManager[sa.Connection]:
        """A transaction that writes. There is one at a time among all processes, and it sees all that came before.

        New rows therefore become visible in the order of their ids: who reads one has read all smaller ones.
        """

    @abstractmethod
    def insert(self, table: sa.Table) -> Upsert:
        """An insert that can say what to do on conflict."""

    @abstractmethod
    def disk_bytes(self) -> int:
        """Bytes that the database takes, as far as it is ours."""

    @abstractmethod
    def shrink(self) -> bool:
        """Give the room of deleted rows back to the file system; false while another process is in the way."""

    @abstractmethod
    def secure_erase(self, *, rewrite: bool) -> bool:
        """Leave no byte of what was deleted, with `rewrite` by writing everything anew; false as `shrink`."""

    @abstractmethod
    def problems(self, connection: sa.Connection) -> list[str]:
        """What is wrong with the structure of the database, as far as it can tell itself."""

    @abstractmethod
    def is_transient(self, error: BaseException) -> bool:
        """Whether what failed may work when it is tried again later, with nothing lost in between."""

    @abstractmethod
    def close(self) -> None:
        """Let go of connections and of being the writer. Idempotent."""


def reason(error: BaseException) -> str:
    """The message of a database, without the statement and the values it was given."""
    original = error.orig if isinstance(error, exc.DBAPIError) else error
    return " ".join(str(original).split())
