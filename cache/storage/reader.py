"""Reads sequences from the database. A row that cannot be read is left out and counted; all others are served."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from agentspec.cache.storage import codec
from agentspec.cache.storage.database import FAILURES, Database, reason
from agentspec.cache.storage.schema import Kinds, damaged, is_sound, namespaces, sequences
from agentspec.cache.tokens import SequenceRecord
from agentspec.errors import CacheError, CacheFormatError, CacheUnavailableError
from agentspec.types import Namespace

_log = logging.getLogger(__name__)

_NAMESPACE: Kinds = [(name, str) for name in ("key", "tenant", "model_fingerprint", "tokenizer_hash", "template_hash")]
PIECE = 256  # rows that are read at a time
POLLED = 16  # rows that `poll` gives at a time: who takes them up keeps others waiting


Conditions = Sequence[sa.ColumnElement[bool]]


class SequenceReader:
    """The sequences in a database, as they are read. Thread-safe, except that one thread at a time may `poll`.

    All methods raise `CacheUnavailableError` where the database does not answer, and `CacheFormatError` where its
    tables are damaged.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.last_id = 0  # rows up to this id were read, or skipped on purpose
        self._newest = 0  # the newest row when `poll` or `position` looked last
        self._whole_at = time.monotonic()  # when what was read last was all there was
        self._damaged: dict[int, str] = {}  # the rows found so far that cannot be read, by id
        self._noting = threading.Lock()

    @property
    def damaged(self) -> int:
        """How many rows were found that cannot be read."""
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

    def namespaces(self) -> list[Namespace]:
        """Every namespace that has sequences, last used last, from running totals: no sequence is looked at."""
        columns = namespaces.c
        with self._reading() as connection:
            query = sa.select(namespaces).where(columns.sequences > 0).order_by(columns.last)
            rows = [row for row in connection.execute(query) if is_sound(row, _NAMESPACE)]
        return [found for row in rows if (found := codec.namespace_of(row)).key == row.key]

    def numbers(self, namespace: Namespace, *, until: int | None = None) -> set[int]:
        """The numbers of a namespace's stored sequences, in rows up to `until` if given."""
        with self._reading() as connection:
            return set(connection.execute(sa.select(sequences.c.number).where(*_rows(namespace, until))).scalars())

    def stored(self, numbers: Sequence[int]) -> set[int]:
        """Those of the sequence `numbers` that are stored; what that takes does not grow with all others."""
        found: set[int] = set()
        for start in range(0, len(numbers), PIECE):
            some = sequences.c.number.in_(numbers[start : start + PIECE])
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

    def poll(self, process: int | None) -> list[SequenceRecord]:
        """The next sequences that processes other than `process` added, oldest first. `unread` says whether more are
        there.
        """
        looked_at = time.monotonic()
        self._newest = self._newest_id()
        number = sequences.c.number
        others = sa.true() if process is None else sa.not_(number.between(process << 32, ((process + 1) << 32) - 1))
        piece = self._piece([others], self.last_id, self._newest, most=POLLED)
        self.last_id = piece[-1][0] if len(piece) == POLLED else max(self._newest, self.last_id)
        if not self.unread:
            self._whole_at = looked_at
        return list(self._readable(piece))

    def records(self) -> Iterator[SequenceRecord]:
        """Every sequence, oldest first, read as they are asked for."""
        return self._records((), 0, self._newest_id())

    def problems(self) -> Iterator[str]:
        """The problems of the database: faults in its structure, then every sequence that cannot be read."""
        try:
            with self._answering():
                found = self._database.problems()
            yield from (f"{self._database.name}: {problem}" for problem in found)
            yield from (f"{self._database.name}: {problem}" for problem in self.unreadable().values())
        except CacheError as error:
            yield str(error)

    def unreadable(self) -> dict[int, str]:
        """What is wrong with each sequence that cannot be read, by the id of its row. Reads the whole table."""
        self._damaged = {}
        for _ in self.records():
            pass
        return dict(self._damaged)

    # How.

    def _newest_id(self) -> int:
        with self._reading() as connection:
            return connection.execute(sa.select(sa.func.max(sequences.c.id))).scalar() or 0

    def _records(
        self, conditions: Conditions, after: int, until: int, *, newest_first: bool = False
    ) -> Iterator[SequenceRecord]:
        """The sequences in rows with `after` < id <= `until`; no transaction stays open between two pieces."""
        while len(piece := self._piece(conditions, after, until, newest_first=newest_first)) == PIECE:
            yield from self._readable(piece)
            after, until = (after, piece[-1][0] - 1) if newest_first else (piece[-1][0], until)
        yield from self._readable(piece)

    def _piece(
        self, conditions: Conditions, after: int, until: int, *, newest_first: bool = False, most: int = PIECE
    ) -> list[tuple[int, sa.Row[Any] | None]]:
        """The first rows of them with their ids; None for each that cannot be read."""
        id_ = sequences.c.id
        query = sa.select(sequences).where(*conditions, id_ > after, id_ <= until)
        query = query.order_by(id_.desc() if newest_first else id_).limit(most)
        try:
            with self._database.engine.connect() as connection:
                return [(row.id, row) for row in connection.execute(query)]
        except (*FAILURES, ValueError, TypeError) as error:  # the last two: a value is not of its column's type
            if isinstance(error, FAILURES) and not self._database.is_damage(error):
                with self._answering():
                    raise
        with self._reading() as connection:
            ids = connection.execute(query.with_only_columns(id_)).scalars().all()
        return [(one, self._row(one)) for one in ids]

    def _row(self, id_: int) -> sa.Row[Any] | None:
        try:
            with self._database.engine.connect() as connection:
                return connection.execute(sa.select(sequences).where(sequences.c.id == id_)).one_or_none()
        except (exc.DBAPIError, ValueError, TypeError) as error:
            if isinstance(error, exc.DBAPIError) and not self._database.is_damage(error):
                with self._answering():
                    raise
            self._lose(id_, reason(error))
            return None

    def _readable(self, rows: Iterable[tuple[int, sa.Row[Any] | None]]) -> Iterator[SequenceRecord]:
        for id_, row in rows:
            try:
                record = None if row is None else codec.decode(row)
            except CacheFormatError as error:
                self._lose(id_, error.message)
            else:
                if record is not None:
                    yield record

    def _lose(self, id_: int, why: str) -> None:
        with self._noting:
            first = not self._damaged
            self._damaged[id_] = f"sequence {id_}: {why}"
        if first:
            advice = "it is left out, like all that cannot be read; `agentspec cache verify` lists them"
            _log.warning("%s: sequence %d: %s; %s", self._database.name, id_, why, advice)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        with self._answering(), self._database.engine.connect() as connection:
            yield connection

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            if self._database.is_transient(error):
                raise CacheUnavailableError(f"{self._database.name} cannot be read: {reason(error)}") from error
            raise damaged(self._database.name, reason(error)) from error


def _rows(namespace: Namespace, until: int | None) -> list[sa.ColumnElement[bool]]:
    mine = sequences.c.namespace == namespace.key
    return [mine] if until is None else [mine, sequences.c.id <= until]
