"""What a cache stores beside its sequences: answers, and what agents' turns taught.

It lies in `state.sqlite3` of the cache's folder, in memory, or in the cache's PostgreSQL database.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from agentspec.cache.deletion import ContentFilter, Selection
from agentspec.cache.side_stores import ResponseStore, ToolTurnStore
from agentspec.cache.storage import deletion_log
from agentspec.cache.storage.database import FAILURES, Database, PendingErasure, reason
from agentspec.cache.storage.opening import prepare
from agentspec.cache.storage.sqlite import STATE, MemoryDatabase, SqliteDatabase
from agentspec.cache.stored import StoreLimits
from agentspec.errors import CacheDamagedError, CacheError

if TYPE_CHECKING:
    from agentspec.cache.storage.sequence_store import SequenceStore

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
        limits: StoreLimits,
        retention: float | None = None,
        content_filter: ContentFilter | None = None,
    ) -> None:
        self._database = _opened(store)
        self._is_shared = store is not None and store.database is self._database
        # A process that was killed may have left bytes.
        pending = store is not None and store.mode == "writer" and not self._is_shared
        self._erasure = PendingErasure(self._database, pending=pending)
        with self._database.engine.connect() as connection:
            self._history = deletion_log.KnownDeletions(deletion_log.last(connection))
        refuses = content_filter.matches if content_filter else None
        most = min(_TOOL_TURN_BYTES, limits.total // 2)
        turns = StoreLimits(most, min(most, limits.tenant or most), retention)
        self.responses = ResponseStore(self._database, limits, refuses, self._history, self._erasure)
        self.tool_turns = ToolTurnStore(self._database, turns, refuses, self._history, self._erasure)
        if store is not None and self._is_shared:
            store.also_forgets += [self.responses.forget_within, self.tool_turns.forget_within]

    def forget(self, selection: Selection) -> None:
        """Delete and erase what the selection covers. In a shared database the deletion of the sequences does so.

        Raises `CacheError` where the database cannot be changed; nothing is deleted then.
        """
        if self._is_shared:
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
        """Whether bytes of what was deleted may still be in the database."""
        return self._erasure.is_pending

    def maintain(self) -> None:
        """Delete what is too old or too much, in each store whatever fails in others. To be called now and then."""
        with ExitStack() as done:
            done.callback(self._erase)
            done.callback(self.note_deletions)
            done.callback(self.responses.maintain)
            done.callback(self.tool_turns.maintain)

    def _erase(self, rewrite_within: int = 0) -> None:
        try:
            self._erasure.finish(rewrite_within=rewrite_within)
        except FAILURES as error:
            raise CacheError(f"deleted, but bytes may be left in {self._database.name}: {reason(error)}") from error

    def close(self) -> None:
        """Write what waits, and release the database. Idempotent."""
        with ExitStack() as released:
            if not self._is_shared:
                released.callback(self._database.close)
            self.tool_turns.flush()


def _opened(store: SequenceStore | None) -> Database:
    if store is None:
        database: Database = MemoryDatabase()
    elif store.folder is None:
        database = store.database
    else:
        database = SqliteDatabase(store.folder, file=STATE)
    try:
        database.connect()
        prepare(database)
    except BaseException as error:
        if store is None or database is not store.database:
            database.close()
        if isinstance(error, FAILURES) and not database.is_damage(error):
            raise CacheError(f"{database.name} cannot be opened: {reason(error)}") from error
        if isinstance(error, (*FAILURES, CacheDamagedError)):
            raise CacheDamagedError(
                f"{database.name}, which holds stored responses and what turns of agents taught, is damaged:"
                f" {reason(error)}; stop what uses it, and restore a backup, or move it away, which forgets them all"
            ) from error
        raise
    return database
