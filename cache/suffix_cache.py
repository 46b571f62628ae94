"""The token cache: namespaces that share nothing, sessions that grow by the difference, a budget in bytes."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agentspec.cache.batch import draft_batch
from agentspec.cache.content_filter import Refusal
from agentspec.cache.deleter import Forgetter
from agentspec.cache.deletion import Decode, seconds_of, select
from agentspec.cache.maintenance import Keeper
from agentspec.cache.memory_budget import MemoryBudget
from agentspec.cache.partition import Space
from agentspec.cache.request import CacheRequest, Output
from agentspec.cache.sessions import Session
from agentspec.cache.stats import CacheStats
from agentspec.cache.storage.record import Row
from agentspec.cache.tokens import TokensLike, as_tokens
from agentspec.errors import (
    CacheClosedError,
    CacheError,
    CacheUnavailableError,
    ConfigurationError,
    InvalidRequestError,
)
from agentspec.types import Labels, Namespace

if TYPE_CHECKING:
    from agentspec.cache.storage.sequence_store import Store
    from agentspec.cache.storage.sync import Persistence

__all__ = ["CacheRequest", "CacheStats", "Mode", "SuffixCache"]

Mode = Literal["auto", "writer", "follower"]

_log = logging.getLogger(__name__)

_BYTES_PER_TOKEN = 32  # most that a session's index holds for a token, with room to merge
_KEEPER_SECONDS = 0.5  # after which a process, idle or not, has followed what others added and forgot


class SuffixCache:
    """Remembers prompts and outputs and drafts what is likely to come next. Thread-safe; a context manager.

    Open it with `SuffixCache.open`.
    """

    def __init__(
        self,
        store: Store | None,
        namespace: Namespace,
        memory_bytes: int,
        tenant_memory_bytes: int | None,
        retention: float | None,
        refusal: Refusal | None,
        store_error: str | None,
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._lock = threading.RLock()
        self._refusal = refusal
        self._keeper: Keeper | None = None
        self._spaces: dict[Namespace, Space] = {}
        self._counts: Counter[str] = Counter()
        self._learned: dict[str, bytes] = {}
        self._budget = MemoryBudget(self._spaces, self._learned, memory_bytes, tenant_memory_bytes)
        self._store_error = store_error  # why there is no store, where there should be one
        self._forgetter = Forgetter(store, self._spaces, self._learned, self._lock, retention)
        # Sequence numbers are unique among the processes that share a store.
        origin = int.from_bytes(os.urandom(4)) >> 1
        self._sequence = count(origin << 32)
        self._persistence: Persistence | None = None
        if store:
            from agentspec.cache.storage.sync import Persistence

            self._persistence = Persistence(self, store, self._forgetter, origin)
        self.closed = False

    @classmethod
    def open(
        cls,
        path: str | Path | None = None,
        *,
        namespace: str | Namespace = "default",
        memory_bytes: int = 512 << 20,
        disk_bytes: int | None = None,
        tenant_memory_bytes: int | None = None,
        tenant_disk_bytes: int | None = None,
        mode: Mode = "auto",
        retention: float | timedelta | None = None,
        refuse_patterns: Sequence[str] = (),
    ) -> SuffixCache:
        """A cache in memory, or with `path`, a folder or `postgresql://user@host/database`, one that outlives it.

        `namespace` is where requests go that name none. `memory_bytes` bounds the index, `disk_bytes` the database with
        its segments, the tenant's bounds what one tenant takes of them; the least recently used goes
        first. One process per database is its writer, which keeps it within bounds; any number follow.
        Mode "writer" raises `CacheLockedError` where another process is the writer, "auto" follows then. Where the
        database cannot be had for now (no permission, no room, no server), "auto" warns and goes on in memory, and the
        other modes raise `CacheUnavailableError`.

        Sequences older than `retention` (seconds or a timedelta) are forgotten at once and every hour, by the writer.
        An output whose text one of `refuse_patterns` (regular expressions) is found in is used for its own session
        only, as is one of a request without `decode`, whose text nobody knows. Raises `ConfigurationError` for
        settings that cannot work, `CacheFormatError` for a database that cannot be read.
        """
        if mode not in ("auto", "writer", "follower"):
            raise ConfigurationError(f"mode must be 'auto', 'writer' or 'follower', not {mode!r}")
        disk = {"disk_bytes": disk_bytes, "tenant_disk_bytes": tenant_disk_bytes}
        for name, limit in {"memory_bytes": memory_bytes, "tenant_memory_bytes": tenant_memory_bytes, **disk}.items():
            if limit is not None and not (isinstance(limit, int) and limit > 0):
                raise ConfigurationError(f"{name} must be a positive number of bytes, not {limit!r}")
        try:
            kept = None if retention is None else seconds_of(retention, "retention")
        except InvalidRequestError as error:
            raise ConfigurationError(error.message, param="retention") from None
        refusal = Refusal(refuse_patterns) if refuse_patterns else None
        store, missing = cls._open_store(path, mode, disk_bytes, tenant_disk_bytes)
        cache = cls(store, Namespace.of(namespace), memory_bytes, tenant_memory_bytes, kept, refusal, missing)
        try:
            cache._start()
        except BaseException:
            cache.close()
            raise
        return cache

    @staticmethod
    def _open_store(
        path: str | Path | None, mode: Mode, disk_bytes: int | None, tenant_disk_bytes: int | None
    ) -> tuple[Store | None, str | None]:
        """The store, or why there is none."""
        if path is None:
            return None, None
        from agentspec.cache.storage.sequence_store import Store

        try:
            return Store.open(path, disk_bytes=disk_bytes, tenant_disk_bytes=tenant_disk_bytes, mode=mode), None
        except CacheUnavailableError as error:
            if mode != "auto":
                raise
            _log.warning("the cache is in memory only, and gone at exit: %s", error)
            return None, error.message

    @property
    def path(self) -> Path | None:
        """The folder of a cache that is kept in one."""
        return self._store.folder if self._store else None

    def request(
        self,
        prompt: TokensLike,
        *,
        namespace: str | Namespace | None = None,
        session: str | None = None,
        workflow: str | None = None,
        step: str | None = None,
        store: bool = True,
        decode: Decode | None = None,
    ) -> CacheRequest:
        """Begin a generation that continues `prompt`. `store=False` leaves nothing of it behind once it is closed.

        `decode` turns token ids into text; it is needed, and used, only where a cache refuses patterns.
        Without a session name, the session whose last prompt this one continues is found. Raises
        `InvalidRequestError` for what are not token ids, `CacheClosedError` after close.
        """
        tokens = as_tokens(prompt, "prompt")
        for name, label in (("session", session), ("workflow", workflow), ("step", step)):
            if not isinstance(label, str | None):
                raise InvalidRequestError(f"{name} must be a string or None, not {label!r}", param=name)
        self._require_open()
        with self._lock:
            space = self._space(self._namespace if namespace is None else Namespace.of(namespace))
            found = space.sessions.acquire(session, tokens)
            self._add(requests=1)
        try:
            found.begin(tokens, most=max(1, self._budget.most // (2 * _BYTES_PER_TOKEN)))
            self._grown(space, found)
        except BaseException:
            self._release(space, found)
            raise
        labels = Labels(session if session is not None else found.label, workflow, step)
        return CacheRequest(self, space, found, tokens, labels, store=store, decode=decode)

    draft_batch = draft_batch  # a method: it takes the cache first

    def forget(
        self,
        *,
        session: str | None = None,
        tenant: str | None = None,
        tokenizer: str | None = None,
        older_than: float | timedelta | None = None,
        tokens: TokensLike | None = None,
        text: str | None = None,
        decode: Decode | None = None,
    ) -> int:
        """Forget what all conditions given hold for; returns how many sequences of the shared past went.

        `session`: of that name. `tenant`: in all its namespaces. `tokenizer`: in namespaces of that tokenizer hash.
        `older_than`: finished that many seconds ago, or that timedelta. `tokens`: holding these ids in a row. `text`:
        holding it once `decode` has turned their ids into text. What stood before an output, as far as it is kept, is
        searched too, and half of a pattern at the edge of what is kept counts for the whole.

        On return no draft, learned number or stored byte of them is left, and other processes at the same folder
        follow within seconds. Sessions that the first three conditions hold for begin anew from their next prompt;
        of their requests in progress nothing is shared. Raises `InvalidRequestError` for conditions that cannot be,
        and `CacheError` when the database cannot be changed: then nothing is forgotten.
        """
        self._require_open()
        selection = select(
            session=session,
            tenant=tenant,
            tokenizer=tokenizer,
            older_than=older_than,
            tokens=tokens,
            text=text,
            decode=decode,
        )
        return self._forgetter.forget(selection)

    def flush(self) -> None:
        """Return when everything closed so far is on disk. Raises `CacheError` when it cannot be written."""
        self._require_open()
        if self._persistence:
            self._persistence.flush()
        elif self._store_error:
            raise CacheError(f"the cache is in memory only: {self._store_error}")

    def compact(self) -> int:
        """Write what was closed so far to the database, and it and all segments anew; returns the bytes on disk.

        Segments make the next open quick and are written now and then anyway. Raises `CacheLockedError` where another
        process is the writer, `CacheError` when it cannot be done. A cache in memory takes 0 bytes.
        """
        self._require_open()
        return self._persistence.compact() if self._persistence else 0

    def tenant_bytes(self) -> dict[str, int]:
        """What each tenant takes in memory, over all its namespaces."""
        with self._lock:
            return dict(self._budget.by_tenant())

    def stats(self) -> CacheStats:
        """Raises `CacheClosedError` after close."""
        self._require_open()
        with self._lock:
            spaces = self._spaces.values()
            return CacheStats(
                **self._counts,
                forgotten=self._forgetter.forgotten,
                namespaces=len(spaces),
                sessions=sum(len(space.sessions) for space in spaces),
                sequences=sum(space.shared.sequence_count for space in spaces),
                tokens=sum(space.shared.token_count for space in spaces),
                memory_bytes=self._budget.taken(),
                segment_bytes=sum(space.shared.mapped_bytes() for space in spaces),
                disk_bytes=self._persistence.disk_bytes() if self._persistence else 0,
                mode=self._store.mode if self._store else "memory",
                store_error=self._store.error if self._store else self._store_error,
                segment_error=self._persistence.segment_error if self._persistence else None,
                unwritten=self._store.dropped if self._store else 0,
            )

    def check_integrity(self) -> None:
        """Raise `CacheFormatError` when an index is damaged. Linear in the size of the cache."""
        self._require_open()
        with self._lock:
            indexes = [space.shared for space in self._spaces.values()]
            indexes += [session.index for space in self._spaces.values() for session in space.sessions]
        for index in indexes:
            index.check_integrity()

    def close(self) -> None:
        """Write what is left and release the folder. Requests still open cannot go on. Idempotent."""
        if self._keeper:
            self._keeper.close()
        if self._persistence and not self.closed:
            self._persistence.close()
        with self._forgetter.following, self._lock:
            if self.closed:
                return
            if self._persistence:
                self._persistence.report_usage()
            self.closed = True
            self._spaces.clear()
        if self._store:
            self._store.close()

    def __enter__(self) -> SuffixCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What requests call back.

    def _require_open(self) -> None:
        if self.closed:
            raise CacheClosedError("this cache is closed")

    def _add(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def _drafted(self, drafted: int, accepted: int) -> None:
        self._add(steps=1, drafted=drafted, accepted=accepted, hits=int(accepted > 0))

    def _share(self, output: Output, decode: Decode | None) -> None:
        if self._refusal and self._refusal.refuses(output.context, output.tokens, decode):
            self._add(refused=1)
            return
        with self._forgetter.sharing:
            if output.session.forgotten:
                return
            number, space = next(self._sequence), output.space
            row = Row(number, space.namespace, output.labels, output.tokens, output.context, time.time())
            space.drafter.observe_end(int(row.tokens[-1]))
            self._add_to(space, row)
            if self._store:
                self._store.put(row)
        self._enforce_budget()

    @staticmethod
    def _add_to(space: Space, row: Row) -> None:
        space.share(row.sequence, row.tokens, row.context, row.labels.session, row.created_at)

    def _abandoned(self) -> None:
        self._add(partial=1)

    def _grown(self, space: Space, session: Session) -> None:
        """Account for a session's growth, and make room where it went over the budget."""
        if session.size() == session.measured:
            return
        with self._lock:
            space.sessions.measure(session)
        self._enforce_budget()

    def _release(self, space: Space, session: Session, *, keep: bool = True) -> None:
        with self._lock:
            if keep:
                space.sessions.release(session)
            else:
                space.sessions.forget(session)

    def _enforce_budget(self) -> None:
        with self._lock:
            if evicted := self._budget.enforce():
                self._add(evicted=evicted)

    # Store.

    def _space(self, namespace: Namespace) -> Space:
        if namespace not in self._spaces:
            space = self._spaces[namespace] = Space(namespace)
            if state := self._learned.get(namespace.key):
                space.restore(state)
        return self._spaces[namespace]

    def _start(self) -> None:
        """Read what is kept on disk, and look after it from now on."""
        if self._persistence:
            self._persistence.start(self._learned)
        if self._store or self._forgetter.expires:
            self._keeper = Keeper(self._keep, seconds=_KEEPER_SECONDS, name="agentspec-cache-keeper")

    def _keep(self) -> None:
        if self._persistence:
            self._persistence.follow()
        self._forgetter.keep()
        if self._persistence:
            self._persistence.keep()
