"""Reads sequences from the database. A row that cannot be read is left out and counted; all others are served."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from agentspec.cache.record import SequenceRecord
from agentspec.cache.storage import codec
from agentspec.cache.storage.database import FAILURES, Database, Result, reason
from agentspec.cache.storage.rows.pages import PIECE, RowPages
from agentspec.cache.storage.schema import Kinds, damaged, is_sound, learned, namespaces, sequences
from agentspec.errors import CacheDamagedError, CacheError, CacheFormatError, CacheUnavailableError
from agentspec.types import Namespace

_log = logging.getLogger(__name__)

_NAMESPACE: Kinds = (
    *((name, str) for name in ("key", "tenant", "model_fingerprint", "tokenizer_hash", "template_hash")),
    *((name, int) for name in ("sequences", "tokens", "bytes")),
)
POLLED = 16  # rows that `poll` gives at a time: who takes them up keeps others waiting
_NONE: Sequence[sa.ColumnElement[bool]] = ()


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """What the database holds of one namespace: numbers of sequences and tokens, and bytes of packed tokens."""

    namespace: Namespace
    sequences: int
    tokens: int
    bytes: int


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
        self.met_damage = False  # whether more than single values is damaged, since it was mended last

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

    def namespaces(self) -> list[StoredNamespace]:
        """Every namespace that has sequences, last used last, from running totals: no sequence is looked at.

        Where those are damaged, the sequences are.
        """
        return self._despite_damage(self._totals, self._counted)

    def _totals(self) -> list[StoredNamespace]:
        columns = namespaces.c
        with self._reading() as connection:
            query = sa.select(namespaces).where(columns.sequences > 0).order_by(columns.last)
            rows = [row for row in connection.execute(query) if is_sound(row, _NAMESPACE)]
        found = (
            StoredNamespace(
                codec.namespace_of(row),
                *(row.sequences, row.tokens, row.bytes),
            )
            for row in rows
        )
        return [one for one, row in zip(found, rows, strict=True) if one.namespace.key == row.key]

    def _counted(self) -> list[StoredNamespace]:
        found: dict[Namespace, tuple[int, int, int]] = {}
        columns = (
            sequences.c.id,
            *(sequences.c[name] for name in codec.NAMES),
            sequences.c.token_count,
            sequences.c.size,
        )
        with self._answering():
            for piece in self._pieces(_NONE, 0, self._newest_id(), columns=columns):
                for row in filter(codec.names_agree, piece):
                    namespace = codec.namespace_of(row)
                    count, tokens, size = found.pop(namespace, (0, 0, 0))  # and put back as the last one used
                    found[namespace] = count + 1, tokens + row.token_count, size + row.size
        return [StoredNamespace(namespace, *sizes) for namespace, sizes in found.items()]

    def numbers(self, namespace: Namespace, *, until: int | None = None) -> set[int]:
        """The numbers of a namespace's stored sequences, in rows up to `until` if given."""
        mine = _rows(namespace, until)

        def by_index() -> set[int]:
            with self._reading() as connection:
                return set(connection.execute(sa.select(sequences.c.number).where(*mine)).scalars())

        def one_by_one() -> set[int]:
            columns = (sequences.c.id, sequences.c.number)
            pieces = self._pieces(mine, 0, self._newest_id(), columns=columns)
            with self._answering():
                return {row.number for piece in pieces for row in piece}

        return self._despite_damage(by_index, one_by_one)

    def stored(self, namespace: Namespace, numbers: Sequence[int]) -> set[int]:
        """Those of a namespace's sequence `numbers` that are stored; what that takes does not grow with all others."""

        def by_index() -> set[int]:
            found: set[int] = set()
            for start in range(0, len(numbers), PIECE):
                some = sequences.c.number.in_(numbers[start : start + PIECE])
                with self._reading() as connection:
                    found.update(connection.execute(sa.select(sequences.c.number).where(some)).scalars())
            return found

        return self._despite_damage(by_index, lambda: self.numbers(namespace) & set(numbers))

    def extent(self, namespace: Namespace, *, until: int) -> tuple[int, int]:
        """A namespace's count of rows up to `until`, and the last row's sequence number. Much faster than `numbers`.

        The count is -1 where damage keeps it from being told.
        """
        mine = _rows(namespace, until)
        newest = sa.select(sequences.c.number).where(*mine).order_by(sequences.c.id.desc()).limit(1)

        def read() -> tuple[int, int]:
            with self._reading() as connection:
                count = connection.execute(sa.select(sa.func.count()).where(*mine)).scalar_one()
                return count, connection.execute(newest).scalar() or 0

        return self._despite_damage(read, lambda: (-1, 0))

    def learned_of(self, namespace: Namespace) -> bytes | None:
        """One namespace's learned state, if there is one that can be read."""
        query = sa.select(learned.c.state).where(learned.c.namespace == namespace.key)

        def read() -> object:
            with self._reading() as connection:
                return connection.execute(query).scalar()

        state = self._despite_damage(read, lambda: None)
        return state if isinstance(state, bytes) else None

    # Sequences.

    def newest(self, namespace: Namespace, beyond: int = 0) -> Iterator[SequenceRecord]:
        """The sequences of one namespace in rows after `beyond`, newest first, read as they are asked for."""
        mine = [sequences.c.namespace == namespace.key]  # with the tenant, damaged rows would be read by no namespace
        return self._readable(self._pages(mine, beyond, self._newest_id(), newest_first=True))

    def hottest(self, tenant: str, tokenizer_hash: str, limit: int) -> list[SequenceRecord]:
        """A tenant's sequences of a tokenizer that were drafted from most often, then the newest, of at most `limit`
        tokens together.
        """
        mine = (sequences.c.tenant == tenant) & (sequences.c.tokenizer_hash == tokenizer_hash)
        ranked = sa.select(sequences.c.id, sequences.c.token_count).where(mine)
        chosen: list[int] = []
        with self._reading() as connection:
            for id_, count in connection.execute(ranked.order_by(sequences.c.hits.desc(), sequences.c.id.desc())):
                limit -= max(0, count) if isinstance(count, int) else 0  # a damaged row is left out below
                if limit < 0:
                    break
                chosen.append(id_)
            rows = [connection.execute(sa.select(sequences).where(sequences.c.id == id_)).first() for id_ in chosen]
        return list(self._readable(row for row in rows if row is not None))

    def poll(self, process: int | None) -> list[SequenceRecord]:
        """The next sequences that processes other than `process` added, oldest first. `unread` says whether more are
        there.
        """
        looked_at = time.monotonic()
        self._newest = self._newest_id()
        number = sequences.c.number
        others = sa.true() if process is None else sa.not_(number.between(process << 32, ((process + 1) << 32) - 1))
        with self._answering():
            piece = next(self._pieces([others], self.last_id, self._newest, piece=POLLED), ())
        self.last_id = piece[-1].id if piece else max(self._newest, self.last_id)
        if not self.unread:
            self._whole_at = looked_at
        return list(self._readable(piece))

    def records(self) -> Iterator[SequenceRecord]:
        """Every sequence, oldest first, read as they are asked for."""
        return self._readable(self._pages(_NONE, 0, self._newest_id()))

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

    def recheck(self) -> None:
        """Stop counting damaged rows that are gone."""
        ids = list(self._damaged)
        for start in range(0, len(ids), PIECE):
            some = ids[start : start + PIECE]
            with self._reading() as connection:
                left = set(connection.execute(sa.select(sequences.c.id).where(sequences.c.id.in_(some))).scalars())
            for gone in set(some) - left:
                self._damaged.pop(gone, None)

    # How.

    def _newest_id(self) -> int:
        def greatest() -> int:
            with self._reading() as connection:
                return connection.execute(sa.select(sa.func.max(sequences.c.id))).scalar() or 0

        def handed_out() -> int:
            with self._reading() as connection:
                return self._database.counter(connection, sequences.name)

        return self._despite_damage(greatest, handed_out)

    def _despite_damage(self, read: Callable[[], Result], instead: Callable[[], Result]) -> Result:
        """`read()`; where what it looks at is damaged, `instead()`, and whoever writes is to mend it."""
        try:
            return read()
        except CacheDamagedError as error:
            if not isinstance(error.__cause__, exc.DBAPIError) or not self._database.is_damage(error.__cause__):
                raise
            self.met_damage = True
            return instead()

    def _pages(
        self, conditions: Sequence[sa.ColumnElement[bool]], after: int, until: int, *, newest_first: bool = False
    ) -> Iterator[sa.Row[Any]]:
        with self._answering():
            for piece in self._pieces(conditions, after, until, newest_first=newest_first):
                yield from piece

    def _pieces(
        self, conditions: Sequence[sa.ColumnElement[bool]], after: int, until: int, **options: Any
    ) -> Iterator[Sequence[sa.Row[Any]]]:
        return iter(RowPages(self._database, conditions, after, until, lost=self._lose_page, **options))

    def _readable(self, rows: Iterable[sa.Row[Any]]) -> Iterator[SequenceRecord]:
        for row in rows:
            try:
                record = codec.decode(row)
            except CacheFormatError as error:
                self._lose(row.id, error.message)
            else:
                yield record

    def _lose_page(self, id_: int, why: str) -> None:
        self.met_damage = True
        self._lose(id_, why)

    def _lose(self, id_: int, why: str) -> None:
        with self._noting:
            first = not self._damaged
            self._damaged[id_] = f"sequence {id_}: {why}"
        if first:
            advice = "it is left out, like all that cannot be read; `agentspec cache repair` lists and removes them"
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
