"""The token cache: `SuffixCache` opens it, begins requests, deletes, and keeps within its budgets in bytes."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import fields, replace
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentspec.cache.deleter import Deleter
from agentspec.cache.deletion import ContentFilter, Decode, PartlyForgottenError, seconds_of, select
from agentspec.cache.inspection import CacheStats, NamespaceStats, check_integrity, memory_stats, namespace_stats
from agentspec.cache.lifetime import OPEN, MaintenanceThread
from agentspec.cache.request import CachePool, CacheRequest
from agentspec.cache.stored import StoreLimits
from agentspec.cache.tokens import TokensLike, as_tokens
from agentspec.errors import (
    CacheDamagedError,
    CacheError,
    CacheFormatError,
    ConfigurationError,
    InvalidRequestError,
)
from agentspec.types import DEFAULT_TENANT, Namespace

if TYPE_CHECKING:
    from agentspec.cache.response_store import ResponseStore, State
    from agentspec.cache.storage.sequence_store import SequenceStore
    from agentspec.cache.sync import StoreSync

__all__ = ["CacheRequest", "CacheStats", "Mode", "SuffixCache"]

Mode = Literal["auto", "writer", "follower"]

_log = logging.getLogger(__name__)


class SuffixCache:
    """Stores prompts and outputs and drafts the tokens that are likely to come next. Thread-safe; a context manager.

    Open it with `SuffixCache.open`.
    """

    def __init__(
        self,
        store: SequenceStore | None,
        store_error: str | None = None,
        *,
        memory: tuple[int, int | None],
        answers: tuple[StoreLimits, StoreLimits],
        retention: float | None,
        content_filter: ContentFilter | None,
    ) -> None:
        self._store = store
        self._store_error = store_error  # why there is no store although a path was given
        self._pool = CachePool(
            *memory,
            content_filter=content_filter,
            numbers=store.numbering if store else None,
            persist=store.writer.put if store else None,
        )
        self._state: State | None = None
        self._opening_state = threading.Lock()
        self._state_settings = *answers, content_filter
        self._deleter = Deleter(self._pool, store, retention)
        self.on_forget = self._deleter.listen  # for engines, which derive more from the same text
        self._maintenance: MaintenanceThread | None = None
        self._left_behind = False
        self._starting = threading.Lock()
        self._pool.namespaces.on_pressure = self._relieve_soon
        self._sync: StoreSync | None = None
        if store:
            from agentspec.cache.sync import StoreSync

            self._sync = StoreSync(self._pool, store, self._deleter)

    @classmethod
    def open(
        cls,
        path: str | Path | None = None,
        *,
        memory_bytes: int = 512 << 20,
        disk_bytes: int | None = None,
        tenant_memory_bytes: int | None = None,
        tenant_disk_bytes: int | None = None,
        mode: Mode = "auto",
        retention: float | timedelta | None = None,
        refuse_patterns: Sequence[str] = (),
        responses_bytes: int = 64 << 20,
        runs_bytes: int | None = None,
        runs_retention: float | timedelta = 7 * 86400.0,
    ) -> SuffixCache:
        """Open a cache in memory, or one that persists at `path`: a folder or `postgresql://user@host/database`.

        `memory_bytes` bounds the index and `disk_bytes` the database with its segments, the tenant limits one tenant's
        part of each. In memory the least recently used sequences are evicted first, on disk the oldest. One process per
        database is its writer, which enforces the bounds; any number follow. Where another process is the writer, mode
        "writer" raises `CacheLockedError` and "auto" follows; where the database cannot be used for now (no permission,
        room, locks or server), "auto" warns and goes on in memory, and the other modes raise `CacheError`.

        The writer deletes sequences older than `retention` (seconds or a timedelta). If a text matches one of
        `refuse_patterns`, or is unknown because the request has no `decode`, its output serves its own session only.
        Answers in `responses` take at most `responses_bytes`, and are deleted after 30 days, or `retention` if that is
        less; calls of models in `runs`, stored only with `runs_bytes`, likewise, and after `runs_retention`. Raises
        `ConfigurationError` for settings that cannot work, `CacheFormatError` for a damaged database.
        """
        if mode not in ("auto", "writer", "follower"):
            raise ConfigurationError(f"mode must be 'auto', 'writer' or 'follower', not {mode!r}")
        _require_bytes(memory_bytes=memory_bytes, responses_bytes=responses_bytes)
        limits = {"tenant_memory_bytes": tenant_memory_bytes, "tenant_disk_bytes": tenant_disk_bytes}
        _require_bytes(disk_bytes=disk_bytes, runs_bytes=runs_bytes, **limits, optional=True)
        try:
            term = None if retention is None else seconds_of(retention, "retention")
            runs_term = min(seconds_of(runs_retention, "runs_retention"), math.inf if term is None else term)
        except InvalidRequestError as error:
            raise ConfigurationError(error.message, param=error.param) from None
        started = partial(
            cls._started,
            memory=(memory_bytes, tenant_memory_bytes),
            answers=(
                StoreLimits.of_responses(responses_bytes, term, disk_bytes, tenant_disk_bytes),
                StoreLimits.of_responses(runs_bytes or 0, runs_term, disk_bytes, tenant_disk_bytes),
            ),
            retention=term,
            content_filter=ContentFilter(refuse_patterns) if refuse_patterns not in ((), []) else None,
        )
        if path is None:
            return started(None)
        from agentspec.cache.storage.sequence_store import SequenceStore

        def opened() -> SuffixCache:
            store = SequenceStore.open(path, disk_bytes=disk_bytes, tenant_disk_bytes=tenant_disk_bytes, mode=mode)
            return started(store)

        try:
            try:
                return opened()
            except CacheDamagedError:  # a writer replaces the database, now that the damage is known
                return opened()
        except CacheError as error:
            if mode != "auto" or isinstance(error, CacheFormatError):
                raise
            _log.warning("the cache is in memory only, and gone at exit: %s", error)
            return started(None, error.message)

    @property
    def path(self) -> Path | None:
        """The cache's folder; None for a cache in memory or on a database server."""
        return self._store.folder if self._store else None

    @property
    def responses(self) -> ResponseStore:
        return self._opened_state().responses

    @property
    def runs(self) -> ResponseStore:
        """Calls of models as the gateway's page shows them."""
        return self._opened_state().runs

    def _opened_state(self) -> State:
        """In a cache in memory it is opened, and looked after, from its first use on."""
        if self._state:
            return self._state
        from agentspec.cache.response_store import State

        self._pool.require_open()
        with self._opening_state:
            self._state = self._state or State(self._store, *self._state_settings)
        if self._store is None:
            self._maintenance_thread()
        return self._state

    @property
    def closed(self) -> bool:
        return self._pool.closed

    def request(
        self,
        prompt: TokensLike,
        *,
        namespace: str | Namespace = DEFAULT_TENANT,
        session: str | None = None,
        store: bool = True,
        decode: Decode | None = None,
        share: bool = True,
    ) -> CacheRequest:
        """Begin a request that continues `prompt`. With `store=False` the cache keeps nothing of it once it is closed,
        with `share=False` only its session keeps its output, and nothing is written.

        `decode` turns token ids into text; only a cache with `refuse_patterns` needs and calls it. Without a session
        name, the request joins the session whose last prompt `prompt` continues. Raises `InvalidRequestError` unless
        `prompt` holds token ids, `CacheClosedError` after close.
        """
        tokens = as_tokens(prompt, "prompt")
        if session is not None and not isinstance(session, str):
            raise InvalidRequestError(f"session must be a string or None, not {session!r}", param="session")
        self._pool.require_open()
        chosen = namespace_of(namespace)
        partition, found = self._pool.acquire(chosen, session, tokens)
        try:
            return CacheRequest(self._pool, partition, found, tokens, store=store, decode=decode, share=share)
        except BaseException:
            self._pool.release(partition, found)
            raise

    def forget(
        self,
        *,
        session: str | None = None,
        tenant: str | None = None,
        tokenizer: str | None = None,
        older_than: float | timedelta | None = None,
        text: str | None = None,
        decode: Decode | None = None,
    ) -> int:
        """Delete the sequences that meet all conditions given; returns how many cached past outputs were deleted.

        `session`: the session of that name. `tenant`: all its namespaces. `tokenizer`: namespaces of that tokenizer
        hash. `older_than`: outputs that finished longer ago, in seconds or as a timedelta. `text`: sequences whose
        text, by `decode`, holds it. The kept end of the prompt before an output is searched too.

        On return no draft, learned number or stored byte of these sequences is left, and other processes that use the
        database follow within seconds. Sessions that meet `session`, `tenant` and `tokenizer` begin again from their
        next prompt, and the outputs of their open requests are not shared. Raises `InvalidRequestError` for invalid
        conditions, and `CacheError` when the database cannot be changed: then no sequence is deleted, but with
        `PartlyForgottenError` what is in memory, where the database could not be opened.
        """
        self._pool.require_open()
        places = {"session": session, "tenant": tenant, "tokenizer": tokenizer}
        selection = select(**places, older_than=older_than, text=text, decode=decode)
        self._opened_state().forget(selection)  # also what is under way, and stored later
        count = self._deleter.forget(selection)
        self._opened_state().note_deletions()
        if self._store_error:
            raise PartlyForgottenError(
                f"{count} sequences were forgotten in memory alone: the database could not be opened, and may hold more"
                f" ({self._store_error}); forget again once it answers, with `agentspec cache forget` or a cache opened"
                " again",
                count,
            )
        return count

    def flush(self) -> None:
        """Wait until the outputs of all requests closed so far are on disk. Raises `CacheError` if writing fails."""
        self._pool.require_open()
        if self._sync:
            self._sync.flush()
        elif self._store_error:
            raise CacheError(f"the cache is in memory only: {self._store_error}")

    def compact(self) -> int:
        """Flush, then rewrite the database and all segments; returns the bytes on disk, 0 for a cache in memory.

        Segments make the next open quick; the writer also writes them from time to time without this call. Raises
        `CacheLockedError` where another process is the writer, `CacheError` when rewriting fails.
        """
        self._pool.require_open()
        return self._sync.compact() if self._sync else 0

    def tenant_bytes(self) -> dict[str, int]:
        """The bytes that each tenant takes in memory, over all its namespaces."""
        self._pool.require_open()
        return dict(self._pool.namespaces.bytes_by_tenant())

    def stats(self) -> CacheStats:
        """A snapshot of sizes and counts. Raises `CacheClosedError` after close."""
        self._pool.require_open()
        stats = memory_stats(self._pool)
        if self._store is None or self._sync is None:
            return replace(stats, store_error=self._store_error)
        found = replace(stats, **self._sync.figures())
        return replace(found, erasure_pending=found.erasure_pending or self._opened_state().erasure.is_pending)

    def namespaces(self, tenant: str | None = None) -> list[NamespaceStats]:
        """What each namespace in memory takes, how old it is and what it was good for; of one tenant, or of all."""
        self._pool.require_open()
        return namespace_stats(self._pool, tenant)

    def disk_bytes(self) -> dict[str, int]:
        """The bytes that each tenant's sequences take in the database; none for a cache in memory. Raises `CacheError`
        where the database does not answer.
        """
        self._pool.require_open()
        return self._store.tenant_bytes() if self._store else {}

    def check_integrity(self) -> None:
        """Raise `CacheFormatError` when an index is damaged. Linear in the size of the cache."""
        self._pool.require_open()
        check_integrity(self._pool)

    def close(self) -> None:
        """Write what is not on disk yet and release the database. Open requests raise from now on. Idempotent."""
        if self._left_behind:
            return
        OPEN.discard(self)
        with contextlib.ExitStack() as released:  # whatever fails, the database is free for others afterwards
            if self._store:
                released.callback(self._store.close)
            if self._state:
                released.callback(self._state.close)
            released.callback(self._pool.close)
            with self._starting:  # a request that is just being served must not start the thread hereafter
                self._pool.namespaces.stopping = True
            if self._maintenance:
                self._maintenance.close()
            if self._sync and not self.closed:
                self._sync.close()

    def leave_behind(self, reason: str) -> None:
        """Called in a forked process: every use raises `CacheClosedError` with `reason`; the parent's stays open.

        Waits for nothing: a thread that was not copied may hold any lock.
        """
        self._left_behind = True
        self._maintenance = None
        self._pool.leave_behind(reason)
        for database in {one.database for one in (self._store, self._state) if one}:
            database.leave_behind(reason)

    def __enter__(self) -> SuffixCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def _started(cls, store: SequenceStore | None, store_error: str | None = None, **given: Any) -> SuffixCache:
        """A cache with the sequences on disk loaded and maintained from now on; closed where that fails."""
        cache = cls(store, store_error, **given)
        try:
            OPEN.add(cache)
            if cache._sync:
                cache._opened_state()
                cache._sync.start()
            if store or given["retention"] is not None:
                cache._maintenance_thread()
        except BaseException:
            with contextlib.suppress(CacheError):
                cache.close()
            raise
        return cache

    def _maintenance_thread(self) -> MaintenanceThread | None:
        """The thread; a cache in memory starts it when there is work besides the requests. None at its end."""
        with self._starting:
            if self._maintenance is None and not self._pool.namespaces.stopping:
                self._maintenance = MaintenanceThread(self._maintain, self._pool.namespaces.eviction.relieve)
            return self._maintenance

    def _relieve_soon(self) -> None:
        if not self.closed and (thread := self._maintenance or self._maintenance_thread()):
            thread.wake()

    def _maintain(self) -> None:
        with contextlib.ExitStack() as done:  # a stack, the first step last; each is done whatever fails before it
            if self._state:
                done.callback(self._state.maintain)
            if self._sync:
                done.callback(self._sync.maintain)
            done.callback(self._deleter.maintain)
            if self._sync:
                done.callback(self._sync.follow)
            done.callback(self._pool.namespaces.eviction.relieve)


def _require_bytes(*, optional: bool = False, **limits: object) -> None:
    for name, limit in limits.items():
        if optional and limit is None:
            continue
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ConfigurationError(f"{name} must be a positive number of bytes, not {limit!r}", param=name)


_of_tenant = lru_cache(1024)(Namespace)


def namespace_of(value: str | Namespace) -> Namespace:
    """The namespace, or that of the tenant. Raises `InvalidRequestError` unless all names are strings."""
    if isinstance(value, str):
        return _of_tenant(value)
    if isinstance(value, Namespace) and all(isinstance(getattr(value, one.name), str) for one in fields(value)):
        return value
    message = f"namespace must be a string or a Namespace of strings, not {value!r}"
    raise InvalidRequestError(message, param="namespace")
