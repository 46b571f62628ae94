"""Reads sequences from the database. A row that is damaged is left out and counted; all others are served."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa

from agentspec.cache.storage import codec
from agentspec.cache.storage.database import FAILURES, Database, reason
from agentspec.cache.storage.schema import damaged, sequences
from agentspec.cache.tokens import SequenceRecord
from agentspec.errors import CacheDamagedError, CacheError, CacheFormatError, CacheUnavailableError
from agentspec.types import Namespace

_log = logging.getLogger(__name__)

_PIECE = 256  # rows that are read at a time
_POLLED = 16  # rows that `poll` gives at a time: who takes them up keeps others waiting

Conditions = Sequence[sa.ColumnElement[bool]]


class SequenceReader:
    """The sequences in a database, as they are read. Thread-safe, except that one thread at a time may `poll`.

    All methods raise `CacheUnavailableError` where the database does not answer, and `CacheDamagedError` where it
    cannot be read: then the next writer that opens it puts it aside.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self.last_id = 0  # rows up to this id were read, or skipped on purpose
        self._newest = 0  # the newest row when `poll` or `position` looked last
        self._whole_at = time.monotonic()  # when what was read last was all there was
        self._damaged: dict[int, str] = {}  # the rows found so far that are damaged, by id

    @property
    def damaged(self) -> int:
        """How many rows were found that are damaged."""
        return len(self._damaged)

    @property
    def unread(self) -> int:
        """How many rows there are at most, as of the last look, that `poll` has not given yet."""
        return max(0, self._newest - self.last_id)

    @property
    def behind(self) -> float:
        """Seconds since `poll` had last given all there was; grows while the database does not answer."""
        return time.monotonic() - self._whole_at

    # What there is.

    def position(self) -> int:
        """Set `last_id` to the newest row and return it: `poll` gives what comes later."""
        self.last_id = self._newest_id()
        self._newest, self._whole_at = self.last_id, time.monotonic()
        return self.last_id

    def namespaces(self, most: int) -> tuple[set[str], list[Namespace]]:
        """The keys of all namespaces that have sequences, and `most` of them, those written to last first."""
        last = sa.func.max(sequences.c.id)
        query = sa.select(sequences.c.namespace, last).group_by(sequences.c.namespace).order_by(last.desc())
        with self._reading() as connection:
            found = connection.execute(query).all()
            newest = sequences.c.id.in_([id_ for _, id_ in found[:most]])
            rows = connection.execute(sa.select(sequences).where(newest).order_by(sequences.c.id.desc())).all()
        return {str(key) for key, _ in found}, [codec.namespace_of(row) for row in rows if codec.names_agree(row)]

    def numbers(self, namespace: Namespace, *, until: int | None = None) -> set[int]:
        """The numbers of a namespace's stored sequences, in rows up to `until` if given."""
        with self._reading() as connection:
            return set(connection.execute(sa.select(sequences.c.number).where(*_rows(namespace, until))).scalars())

    def stored(self, numbers: Sequence[int]) -> set[int]:
        """Those of the sequence `numbers` that are stored; what that takes does not grow with all others."""
        found: set[int] = set()
        for start in range(0, len(numbers), _PIECE):
            some = sequences.c.number.in_(numbers[start : start + _PIECE])
            with self._reading() as connection:
                found.update(connection.execute(sa.select(sequences.c.number).where(some)).scalars())
        return found

    def extent(self, namespace: Namespace, *, until: int) -> tuple[int, int]:
        """A namespace's count of rows up to `until`, and the last row's sequence number. Much faster than `numbers`."""
        mine = _rows(namespace, until)
        newest = sa.select(sequences.c.number).where(*mine).order_by(sequences.c.id.desc()).limit(1)
        with self._reading() as connection:
            count = connection.execute(sa.select(sa.func.count()).where(*mine)).scalar_one()
            return count, connection.execute(newest).scalar() or 0

    # Sequences.

    def newest(self, namespace: Namespace, beyond: int = 0) -> Iterator[SequenceRecord]:
        """The sequences of one namespace in rows after `beyond`, newest first, read as they are asked for."""
        mine = [sequences.c.namespace == namespace.key]  # with the tenant, damaged rows would be read by no namespace
        return self._records(mine, beyond, self._newest_id(), newest_first=True)

    def poll(self, own: range) -> list[SequenceRecord]:
        """The next sequences with other numbers than `own`, oldest first. `unread` says whether more are there."""
        looked_at = time.monotonic()
        self._newest = self._newest_id()
        others = sa.not_(sequences.c.number.between(own.start, own.stop - 1))
        try:
            piece = self._piece([others], self.last_id, self._newest, most=_POLLED)
        except CacheDamagedError:
            self.last_id = min(self.last_id + _POLLED, self._newest)  # what comes later need not wait for these
            raise
        self.last_id = piece[-1].id if len(piece) == _POLLED else max(self._newest, self.last_id)
        if not self.unread:
            self._whole_at = looked_at
        return list(self._sound(piece))

    def records(self) -> Iterator[SequenceRecord]:
        return self._records((), 0, self._newest_id())

    def problems(self) -> list[str]:
        """The problems of the database: faults in its structure, and every sequence that is damaged."""
        try:
            with self._answering():
                found = self.database.problems()
            self._damaged = {}
            for _ in self.records():
                pass
        except CacheError as error:
            return [str(error)]
        return [f"{self.database.name}: {problem}" for problem in (*found, *self._damaged.values())]

    # How.

    def _newest_id(self) -> int:
        with self._reading() as connection:
            return connection.execute(sa.select(sa.func.max(sequences.c.id))).scalar() or 0

    def _records(
        self, conditions: Conditions, after: int, until: int, *, newest_first: bool = False
    ) -> Iterator[SequenceRecord]:
        """The sequences in rows with `after` < id <= `until`; no transaction stays open between two pieces."""
        while len(piece := self._piece(conditions, after, until, newest_first=newest_first)) == _PIECE:
            yield from self._sound(piece)
            after, until = (after, piece[-1].id - 1) if newest_first else (piece[-1].id, until)
        yield from self._sound(piece)

    def _piece(
        self, conditions: Conditions, after: int, until: int, *, newest_first: bool = False, most: int = _PIECE
    ) -> Sequence[sa.Row[Any]]:
        id_ = sequences.c.id
        query = sa.select(sequences).where(*conditions, id_ > after, id_ <= until)
        with self._reading() as connection:
            return connection.execute(query.order_by(id_.desc() if newest_first else id_).limit(most)).all()

    def _sound(self, rows: Iterable[sa.Row[Any]]) -> Iterator[SequenceRecord]:
        for row in rows:
            try:
                yield codec.decode(row)
            except CacheFormatError as error:
                self._leave_out(row.id, error.message)

    def _leave_out(self, id_: int, why: str) -> None:
        if not self._damaged:
            advice = "it is left out, like all that are damaged; `agentspec cache verify` lists them"
            _log.warning("%s: sequence %d: %s; %s", self.database.name, id_, why, advice)
        self._damaged[id_] = f"sequence {id_}: {why}"

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        with self._answering(), self.database.engine.connect() as connection:
            yield connection

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            if self.database.is_transient(error):
                raise CacheUnavailableError(f"{self.database.name} cannot be read: {reason(error)}") from error
            raise damaged(self.database.name, reason(error)) from error


def _rows(namespace: Namespace, until: int | None) -> list[sa.ColumnElement[bool]]:
    mine = sequences.c.namespace == namespace.key
    return [mine] if until is None else [mine, sequences.c.id <= until]
