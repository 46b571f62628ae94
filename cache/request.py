"""A request as callers see it: draft, extend, close; and what all requests of a cache do with its namespaces."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from types import TracebackType
from typing import Any

import numpy as np

from agentspec.cache.deletion import ContentFilter, Decode
from agentspec.cache.index import DEPTH, Sourced, propose_batch
from agentspec.cache.namespaces import NamespaceTable
from agentspec.cache.partition import TRANSCRIPT, Partition, Session
from agentspec.cache.tokens import EMPTY, SequenceRecord, Tokens, TokensLike, as_tokens, require_budget
from agentspec.errors import CacheClosedError, InvalidRequestError
from agentspec.types import Draft, Namespace, Source

ROUND = 32
"""Tokens that the drafter learns from at a time, before the session's index gets them."""

_MEASURED = 1 << 15  # this part of the budget, or 4096 bytes, a session may differ by from its account during a request

BYTES_PER_TOKEN = 32
"""Upper bound of the bytes that an index takes for a token, with room to merge."""


class CachePool:
    """The partitions that the requests, the deletions and the store of one cache work on. Thread-safe.

    The pool passes every output that it shares to `persist`; sequences get the next of `numbers`.

    Threads take locks in this order: `Deleter.following`; `Partition.lock`, under which all work on one namespace is
    done; the lock of the table and that of the counts, under which nothing takes longer with more text. No request
    waits for the lock of another tenant's partition.
    """

    def __init__(
        self,
        memory_bytes: int,
        tenant_memory_bytes: int | None = None,
        *,
        content_filter: ContentFilter | None = None,
        numbers: Iterator[int] | None = None,
        persist: Callable[[SequenceRecord], None] | None = None,
    ) -> None:
        self.namespaces = NamespaceTable(memory_bytes, tenant_memory_bytes)
        self._measured_bytes = max(4096, self.namespaces.tenant_limit // _MEASURED)
        self._content_filter = content_filter
        self._persist = persist
        self._numbers = count() if numbers is None else numbers
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._closed_because: str | None = None

    @property
    def closed(self) -> bool:
        return self._closed_because is not None

    def require_open(self) -> None:
        if self._closed_because is not None:
            raise CacheClosedError(self._closed_because)

    def close(self) -> None:
        self._closed_because = "this cache is closed"
        self.namespaces.clear()

    def leave_behind(self, reason: str) -> None:
        """Close a copy that a forked process got. Another thread may have held any lock when it was made."""
        self._closed_because = reason
        self._lock = threading.Lock()

    # Sessions and outputs of requests.

    def acquire(self, namespace: Namespace, name: str | None, prompt: Tokens) -> tuple[Partition, Session]:
        """The session of that name, or without a name the session that `prompt` continues, with `prompt` as transcript.

        Only the caller may use the session until `release`.
        """
        while True:
            partition = self.namespaces.find(namespace)
            with partition.lock:
                if not partition.retired:
                    partition.used_at = time.monotonic()
                    session = partition.sessions.acquire(name, prompt)
                    break
        with self._lock:
            self._counts["requests"] += 1
        try:
            session.begin(prompt, limit=max(1, self.namespaces.tenant_limit // (2 * BYTES_PER_TOKEN)))
            self.measure(partition, session)
        except BaseException:
            self.release(partition, session)
            raise
        return partition, session

    def measure(self, partition: Partition, session: Session) -> None:
        """Account for a session's growth, and evict if it exceeds the budget. What is little waits for `release`."""
        if abs(session.size() - session.measured) < self._measured_bytes:
            return
        with partition.lock:
            partition.sessions.measure(session)
        self.namespaces.settle(partition)

    def release(self, partition: Partition, session: Session, *, keep: bool = True) -> None:
        with partition.lock:
            if keep:
                partition.sessions.release(session)
            else:
                partition.sessions.forget(session)
        self.namespaces.settle(partition)

    def add_output(
        self,
        partition: Partition,
        session: Session,
        tokens: Tokens,
        context: Tokens,
        decode: Decode | None,
        *,
        ended: bool,
    ) -> None:
        """Add an output to the cached past outputs, unless its session was deleted or the content filter refuses it.

        Learns the token after which it `ended`. `release`, which follows, looks after the budgets.
        """
        if self._content_filter and self._content_filter.refuses(context, tokens, decode):
            self.count(refused=1)
            return
        with partition.lock:
            if session.forgotten:
                return
            record = SequenceRecord(
                next(self._numbers), partition.namespace, session.label, tokens, context, time.time()
            )
            if ended:
                partition.drafter.observe_end(int(tokens[-1]))
            partition.add(record)
            if self._persist:
                self._persist(record)

    def count(self, partition: Partition | None = None, **counts: int) -> None:
        """Add to the counts of the pool, and to those of `partition`."""
        with self._lock:
            for name, change in counts.items():
                self._counts[name] += change
                if partition is not None:
                    partition.counts[name] += change

    def counts(self) -> dict[str, Any]:
        with self._lock:
            return dict(self._counts)


class CacheRequest:
    """An open request. Leaving the `with` block without an exception closes it and shares its output.

    One thread at a time may use it; different requests of one cache may run in different threads. The caller acquired
    `session` from `pool`; the request releases it at its end.
    """

    def __init__(
        self,
        pool: CachePool,
        partition: Partition,
        session: Session,
        prompt: Tokens,
        *,
        store: bool,
        decode: Decode | None = None,
        share: bool = True,
    ) -> None:
        self.pool = pool
        self.store = store
        self.share = share
        self._decode = decode
        self.partition = partition
        self.drafter = partition.drafter
        self._session = session
        self._text = prompt[-DEPTH:].copy()  # the end of the prompt and the output, with room for more
        self.context = self._text
        """The last `DEPTH` tokens of prompt and output."""
        self._prompt_end = self._written = len(self._text)  # where the output begins, and ends so far
        self._drafts: dict[int, Any] = {}  # native trees not counted yet, by the place in the text where they begin
        self._counts = {"steps": 0, "hits": 0, "drafted": 0, "accepted": 0}
        self._open = True
        self._indexes: list[Sourced] = [
            (session.index, Source.SESSION),
            (partition.shared, Source.SHARED),
            (partition.shapes, Source.SHARED),
        ]

    @property
    def output(self) -> Tokens:
        return self._text[self._prompt_end : self._written].copy()

    @property
    def indexes(self) -> list[Sourced]:
        self._leave_forgotten()
        return list(self._indexes)

    def draft(
        self,
        max_tokens: int = 32,
        min_probability: float = 0.0,
        *,
        chain: bool = False,
        behind: TokensLike = EMPTY,
        patience: float | None = None,
    ) -> Draft:
        """Propose a token tree that continues prompt and output; empty when nothing similar was seen.

        A `chain` has no branches, for targets that verify no trees. `behind` holds output tokens that `extend` will
        be given later; the tree continues after them. After `patience` seconds the tree is returned as far as it has
        grown; without `patience`, when it is whole. No draft waits for another thread.

        Raises `InvalidRequestError` for a bad budget, `CacheClosedError` after the request or the cache was closed.
        """
        self._require_open()
        require_budget(max_tokens, min_probability)
        if patience is not None and not patience >= 0:
            raise InvalidRequestError(f"patience must be seconds, 0 or more, not {patience!r}", param="patience")
        context = self.context
        if behind is not EMPTY:
            behind = as_tokens(behind, "behind")
            context = np.concatenate((context, behind))
        job = self.drafter, self._indexes, context, max_tokens, min_probability, bool(chain)
        [draft] = propose_batch([job], patience)
        self._drafts[self._written + len(behind)] = draft
        return draft

    def extend(self, tokens: TokensLike, *, learn: bool = True) -> None:
        """Record the tokens committed in this step, the target's own included. The session drafts from them at once.

        Without `learn` drafts are not judged by these tokens, say because they were when another request got them.
        Raises `InvalidRequestError` unless `tokens` are token ids, `CacheClosedError` after close.
        """
        self._require_open()
        committed = as_tokens(tokens)
        self._count(committed)
        end = self._written + len(committed)
        if end > len(self._text):
            self._text = np.concatenate((self._text, np.empty(end, np.int32)))
        self._text[self._written : end] = committed
        while self._written < end:
            tokens = self._text[self._written : min(self._written + ROUND, end)]
            if learn:
                self.drafter.observe(self._indexes, self.context, tokens)
            if not self._session.forgotten:
                self._session.index.append(TRANSCRIPT, tokens)
            self._written += len(tokens)
            self.context = self._text[max(0, self._written - DEPTH) : self._written]
        self.pool.measure(self.partition, self._session)

    def count_draft(self, drafted: int, accepted: int) -> None:
        """Count a draft that the caller, with threads of its own, made from `drafter` and `indexes` directly."""
        counts = self._counts
        counts["steps"] += 1
        counts["hits"] += accepted > 0
        counts["drafted"] += drafted
        counts["accepted"] += accepted

    def close(self, *, ended: bool = True) -> None:
        """Finish cleanly: the output joins the namespace's cached past outputs. Idempotent.

        Its last token is learned as one after which outputs end, unless it was cut, say by a limit: then not `ended`.
        """
        self._end(clean=True, ended=ended)

    def abandon(self) -> None:
        """Abort: the output so far is partial, so only this session keeps it. Idempotent."""
        self._end(clean=False)

    def _end(self, *, clean: bool, ended: bool = True) -> None:
        if not self._open:
            return
        self._open = False
        if self.pool.closed:
            return
        self.pool.count(self.partition, **self._counts)
        try:
            if self.store and self.share:
                if not clean:
                    self.pool.count(partial=1)
                elif self._written > self._prompt_end:
                    self.pool.add_output(
                        self.partition,
                        self._session,
                        self.output,
                        self._text[: self._prompt_end].copy(),
                        self._decode,
                        ended=ended,
                    )
        finally:
            self.pool.release(self.partition, self._session, keep=self.store)

    def _leave_forgotten(self) -> None:
        """Stop drafting from the session's own text if the session was deleted meanwhile."""
        if self._session.forgotten:
            self._indexes = [pair for pair in self._indexes if pair[0] is not self._session.index]

    def __enter__(self) -> CacheRequest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(clean=error is None)

    def _require_open(self) -> None:
        if not self._open:
            raise CacheClosedError("this cache request is closed")
        self.pool.require_open()
        self._leave_forgotten()

    def _count(self, committed: Tokens) -> None:
        """Count how many of the committed tokens each registered draft that begins among them had right."""
        end = self._written + len(committed)
        for start in [start for start in self._drafts if start < end]:
            draft = self._drafts.pop(start)
            self.count_draft(len(draft), draft.path_length(committed[start - self._written :]))
