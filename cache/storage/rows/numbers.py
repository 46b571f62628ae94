"""Hands out the numbers of the sequences that this process adds."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from itertools import count

from agentspec.cache.storage.database import FAILURES, Database
from agentspec.cache.storage.schema import processes
from agentspec.errors import CacheError


class SequenceNumbers:
    """An iterator over the numbers of the sequences that this process adds. Thread-safe.

    The database hands out their upper half by `claim`, or when the first is asked for, so that no other process has
    the same.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._numbers: Iterator[int] | None = None
        self.process: int | None = None  # the upper half; None: no number was asked for yet

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self._numbers is None:
            self.claim(anyhow=True)
        assert self._numbers is not None
        return next(self._numbers)

    def claim(self, *, anyhow: bool = False) -> None:
        """Get the upper half now, unless it is there, which may wait for the disk. Raises `DBAPIError` or `CacheError`
        where trying later would not help, unless `anyhow`.
        """
        if self._numbers is not None:
            return
        with self._lock:
            if self._numbers is None:
                self.process = -self._hand_out(anyhow)
                # A server that lost its last transactions hands a number out twice: begin elsewhere each time.
                self._numbers = count((self.process << 32) + secrets.randbits(31))

    def _hand_out(self, anyhow: bool) -> int:
        """A number that no other process has; where nothing can be written, a random one beyond all of them."""
        try:
            return self._insert()
        except (*FAILURES, CacheError) as error:
            if not (anyhow or self._database.is_transient(error)):
                raise
            return secrets.randbits(30) + (1 << 30)

    def _insert(self) -> int:
        with self._database.writing() as connection:
            number = int(connection.execute(processes.insert().returning(processes.c.id)).scalar_one())
            connection.execute(processes.delete().where(processes.c.id < number))
            return number
