"""What a cache stores beside its sequences: answers, and what agents' turns taught.

It lies in `state.sqlite3` of the cache's folder, in memory, or in the cache's PostgreSQL database.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import sqlalchemy as sa

from agentspec.cache.content_filter import ContentFilter
from agentspec.cache.deletion import Selection
from agentspec.cache.responses import ResponseLimits
from agentspec.cache.responses.table import ResponseStore
from agentspec.cache.storage import deletion_log
from agentspec.cache.storage.database import FAILURES, Database, PendingErasure, reason
from agentspec.cache.storage.schema import deletions, meta
from agentspec.cache.storage.sqlite import STATE, MemoryDatabase, SqliteDatabase
from agentspec.cache.tool_turns.table import ToolTurnStore
from agentspec.errors import CacheDamagedError, CacheError, CacheVersionError

if TYPE_CHECKING:
    from agentspec.cache.storage.sequence_store import SequenceStore

VERSION = 1  # a change of the tables takes another: there are no migrations
_TOOL_TURN_BYTES = 32 << 20
_REWRITTEN = 512 << 20  # bytes; a larger database is not written anew when something is forgotten


class State:
    """Opens the state of a cache, and keeps it in order. Thread-safe.

    Raises `CacheDamagedError` where it cannot be read, and `CacheVersionError`: what is in it cannot be made again, so
    that nothing goes on without it.
    """

    def __init__(
        self,
        store: SequenceStore | None,
        responses: ResponseLimits,
        retention: float | None = None,
        content_filter: ContentFilter | None = None,
    ) -> None:
        self._database = _opened(store)
        with self._database.engine.connect() as connection:
            self._history = deletion_log.KnownDeletions(deletion_log.last(connection))
        refuses = content_filter.matches if content_filter else None
        most = min(_TOOL_TURN_BYTES, responses.total // 2)
        self.responses = ResponseStore(self._database, responses, refuses, self._history)
        self.tool_turns = ToolTurnStore(
            self._database, refuses, retention, most, min(most, responses.tenant or most), self._history
        )
        self._erasure: PendingErasure | None = None
        if store is not None and store.database is self._database:
            store.also_forgets += [self.responses.forget_within, self.tool_turns.forget_within]
        else:  # a process that was killed may have left bytes
            self._erasure = PendingErasure(self._database, pending=store is not None and store.mode == "writer")

    def forget(self, selection: Selection) -> None:
        """Delete and erase what the selection covers. In a shared database the deletion of the sequences does so.

        Raises `CacheError` where the database cannot be changed; nothing is deleted then.
        """
        if self._erasure is None:
            return
        try:
            with self._database.writing() as connection:
                deletion_log.log(connection, selection.scope)
                gone = self.responses.forget_within(connection, selection)
                gone += self.tool_turns.forget_within(connection, selection)
            if gone:
                self._erasure.mark(rewrite=True)
        except FAILURES as error:
            raise CacheError(f"{self._database.name} cannot be changed: {reason(error)}") from error
        if gone:
            self._erase(rewrite_within=_REWRITTEN)

    def note_deletions(self) -> None:
        """What is stored from now on came after the deletions of before."""
        with suppress(*FAILURES), self._database.engine.connect() as connection:  # else they count as later ones
            self._history.note(deletion_log.last(connection))

    @property
    def erasure_pending(self) -> bool:
        """Whether bytes of what was deleted may still be in a database of its own."""
        return self._erasure is not None and self._erasure.is_pending

    def maintain(self) -> None:
        """Delete what is too old or too much, in each store whatever fails in others. To be called now and then."""
        with ExitStack() as done:
            done.callback(self._erase)
            done.callback(self.note_deletions)
            done.callback(self.responses.maintain)
            done.callback(self.tool_turns.maintain)

    def _erase(self, rewrite_within: int = 0) -> None:
        try:
            if self._erasure is not None:
                self._erasure.finish(rewrite_within=rewrite_within)
        except FAILURES as error:
            raise CacheError(f"deleted, but bytes may be left in {self._database.name}: {reason(error)}") from error

    def leave_behind(self, reason: str) -> None:
        """Called in a forked process."""
        self.tool_turns.leave_behind()
        if self._erasure is not None:
            self._database.leave_behind(reason)

    def close(self) -> None:
        """Write what waits, and release the database. Idempotent."""
        with ExitStack() as released:
            if self._erasure is not None:
                released.callback(self._database.close)
            self.tool_turns.close()


def _opened(store: SequenceStore | None) -> Database:
    if store is None:
        database: Database = MemoryDatabase()
    elif store.folder is None:
        database = store.database
    else:
        database = SqliteDatabase(store.folder, file=STATE)
    try:
        database.connect()
        _prepare(database)
    except BaseException as error:
        if store is None or database is not store.database:
            database.close()
        if isinstance(error, FAILURES):
            if not database.is_damage(error):
                raise CacheError(f"{database.name} cannot be opened: {reason(error)}") from error
            raise CacheDamagedError(
                f"{database.name}, which holds stored responses and what turns of agents taught, is damaged:"
                f" {reason(error)}; stop what uses it, and restore a backup, or move it away, which forgets them all"
            ) from error
        raise
    return database


def _prepare(database: Database) -> None:
    """Create the tables where there are none, as `tables.prepare` does for the sequences."""
    with database.engine.connect() as connection:
        if _is_prepared(connection, database):
            return
    with database.writing() as connection:
        if not _is_prepared(connection, database):
            for table in (meta, deletions):
                table.create(connection, checkfirst=True)
            connection.execute(meta.insert().values(key="state", value=str(VERSION)))


def _is_prepared(connection: sa.Connection, database: Database) -> bool:
    if not sa.inspect(connection).has_table(meta.name):
        return False
    version = connection.execute(sa.select(meta.c.value).where(meta.c.key == "state")).scalar()
    if version in (None, str(VERSION)):
        return version is not None
    raise CacheVersionError(
        f"{database.name} has stored responses and turns of version {version}, and this agentspec reads version"
        f" {VERSION} alone: use the agentspec that wrote them, or move the database away, which forgets them"
    )
