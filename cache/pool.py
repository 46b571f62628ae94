"""What the requests of one cache do with its namespaces, and the figures of the cache in memory."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from agentspec.cache.content_filter import ContentFilter
from agentspec.cache.deletion import Decode, Scope
from agentspec.cache.index import SuffixIndex
from agentspec.cache.memory.group import Membership
from agentspec.cache.memory.sessions import Session
from agentspec.cache.namespaces import NamespaceTable
from agentspec.cache.partition import Partition
from agentspec.cache.record import SequenceRecord
from agentspec.cache.tokens import Tokens
from agentspec.errors import CacheClosedError, InvalidRequestError
from agentspec.types import Labels, Namespace

BYTES_PER_TOKEN = 32
"""Upper bound of the bytes that an index takes for a token, with room to merge."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot. Counts are since open unless said otherwise; a step is an `extend` that followed a draft."""

    namespaces: int = 0  # in memory now
    sessions: int = 0  # in memory now
    sequences: int = 0  # cached past outputs now
    tokens: int = 0  # of cached past outputs now
    memory_bytes: int = 0  # now, mapped segments included
    segment_bytes: int = 0  # of them in mapped segments, whose pages all processes share
    disk_bytes: int = 0  # now, segments included
    requests: int = 0
    steps: int = 0
    hits: int = 0  # steps with at least one accepted token
    drafted: int = 0
    accepted: int = 0
    partial: int = 0  # requests aborted
    evicted: int = 0  # sequences and sessions evicted to make room
    unloaded: int = 0  # namespaces that left memory, where the next request loads them again
    forgotten: int = 0  # sequences that this process deleted, on request or by age
    refused: int = 0  # outputs not shared because their text matched a pattern
    mode: Literal["memory", "writer", "follower"] = "memory"
    store_error: str | None = None  # why nothing is written now
    unwritten: int = 0  # outputs and updates that the store gave up writing
    segment_error: str | None = None  # why a segment could not be written or used
    segments_skipped: int = 0  # segments that were damaged or missing, and rebuilt from the database
    damaged: int = 0  # rows of the database that were found unreadable, and are left out
    unread: int = 0  # rows of the database that are known of and not taken in yet, at most
    erasure_pending: bool = False  # bytes of what was deleted may still be in the database's files
    behind: float = 0.0  # seconds since this process had last taken in all that others wrote


class CachePool:
    """The partitions that the requests, the deletions and the store of one cache work on. Thread-safe.

    `memory_bytes` bounds all partitions, `tenant_memory_bytes` the partitions of each tenant, `tenant_namespaces` their
    number. The pool passes every output that it shares to `persist`; sequences get the next of `numbers`.

    Threads take locks in this order: `Deleter.following`; `Partition.lock`, under which all work on one namespace is
    done; the lock of the table and that of the counts, under which nothing takes longer with more text. No request
    waits for the lock of another tenant's partition.
    """

    def __init__(
        self,
        memory_bytes: int,
        tenant_memory_bytes: int | None = None,
        *,
        tenant_namespaces: int | None = None,
        content_filter: ContentFilter | None = None,
        numbers: Iterator[int] | None = None,
        persist: Callable[[SequenceRecord], None] | None = None,
    ) -> None:
        self.namespaces = NamespaceTable(memory_bytes, tenant_memory_bytes, tenant_namespaces)
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
        with self.namespaces.entered(namespace) as partition:
            partition.used_at = time.monotonic()
            session = partition.sessions.acquire(name, prompt)
        self.count(requests=1)
        try:
            session.begin(prompt, limit=max(1, self.namespaces.tenant_limit // (2 * BYTES_PER_TOKEN)))
            self.measure(partition, session)
        except BaseException:
            self.release(partition, session)
            raise
        return partition, session

    def measure(self, partition: Partition, session: Session) -> None:
        """Account for a session's growth, and evict if it exceeds the budget."""
        if session.size() == session.measured and not session.membership:
            return
        with partition.lock:
            partition.sessions.measure(session)
            if session.membership:
                partition.measure_group(session.membership.group)
        self.namespaces.settle(partition)

    def release(self, partition: Partition, session: Session, *, keep: bool = True) -> None:
        with partition.lock:
            if keep:
                partition.sessions.release(session)
            else:
                partition.sessions.forget(session)
        self.namespaces.settle(partition)

    def join(self, partition: Partition, session: Session, group: str, context: Tokens) -> Membership:
        """Let the request that holds `session` draft from the open outputs of a group, and the others from its own.

        Raises `InvalidRequestError` where patterns are refused: they are looked for in finished outputs only.
        """
        if self._content_filter:
            message = "group: a cache with refuse_patterns shares finished outputs only; leave group out"
            raise InvalidRequestError(message, param="group")
        with partition.lock:
            session.membership = partition.join(group, context)
            if session.forgotten:
                session.membership.withdraw()
            return session.membership

    def leave(self, partition: Partition, session: Session, group: str, *, keep: bool) -> None:
        """End a request's part in a group. Its text stays for the others if `keep`, until the last has left."""
        with partition.lock:
            member, session.membership = session.membership, None
            if member:
                if not keep:
                    member.withdraw()
                partition.leave(group, member)

    def add_output(
        self,
        partition: Partition,
        session: Session,
        labels: Labels,
        tokens: Tokens,
        context: Tokens,
        decode: Decode | None,
        *,
        ended: bool,
    ) -> None:
        """Add an output to the cached past outputs, unless its session was deleted or the content filter refuses it.

        Learns the token after which it `ended`.

        `release`, which follows, looks after the budgets.
        """
        if self._content_filter and self._content_filter.refuses(context, tokens, decode):
            self.count(refused=1)
            return
        with partition.lock:
            if session.forgotten:
                return
            record = SequenceRecord(next(self._numbers), partition.namespace, labels, tokens, context, time.time())
            if ended:
                partition.drafter.observe_end(int(tokens[-1]))
            partition.add(record)
            if self._persist:
                self._persist(record)

    def count(self, **counts: int) -> None:
        """Add to the counts of `CacheStats`."""
        with self._lock:
            for name, change in counts.items():
                self._counts[name] += change

    # Outputs of other processes, and what was learned.

    def ingest(self, records: Iterable[SequenceRecord]) -> None:
        """Add sequences from the store that this process does not hold yet.

        Namespaces that are not in memory are left out, unless they are few: what is there is loaded with them later.
        """
        grown = set()
        for record in records:
            if partition := self.namespaces.loaded(record.namespace) or self.namespaces.preload(record.namespace):
                with partition.lock:
                    if not partition.retired and not partition.holds(record.sequence):
                        partition.add(record)
                        grown.add(partition)
        for partition in grown:
            self.namespaces.settle(partition)

    def take_learned(self) -> dict[str, bytes]:
        """By key the learned states that changed since the last call."""
        learned = self.namespaces.take_unsaved()
        for partition in self.namespaces.take_used("learned"):
            with partition.lock:
                if (state := partition.fresh_learned()) is not None:
                    learned[partition.namespace.key] = state
        return learned

    # Deletions.

    def invalidate_sessions(self, scope: Scope) -> None:
        """Delete the sessions in scope. Outputs of their open requests are not shared any more."""
        for partition in self.namespaces.partitions(scope):
            with partition.lock:
                partition.sessions.invalidate(scope)
                self.namespaces.book(partition)

    def covered(self, scope: Scope) -> list[tuple[Partition, list[int]]]:
        """The sequences in scope by partition; each is in the store, or waits to be written."""
        return [(partition, partition.covered(scope)) for partition in self.namespaces.partitions(scope)]

    def forget(self, partition: Partition, sequences: Iterable[int]) -> None:
        """Delete sequences; a partition that is empty then is dropped with its learned state."""
        with partition.lock:
            partition.forget(sequences)
            if partition.is_empty:
                self.namespaces.retire(partition)
            else:
                self.namespaces.book(partition)

    # Inspection.

    def indexes(self) -> list[SuffixIndex]:
        """Every index of every partition and session."""
        found = []
        for partition in self.namespaces.partitions():
            with partition.lock:
                found += [partition.shared, *(session.index for session in partition.sessions)]
        return found

    def stats(self) -> CacheStats:
        """The figures of the cache in memory; the store's fields keep their defaults."""
        partitions = self.namespaces.partitions()
        with self._lock:
            counts: dict[str, Any] = dict(self._counts)
        return CacheStats(
            **counts,
            namespaces=len(partitions),
            sessions=sum(len(one.sessions) for one in partitions),
            sequences=sum(one.shared.sequence_count for one in partitions),
            tokens=sum(one.shared.token_count for one in partitions),
            memory_bytes=self.namespaces.total,
            evicted=self.namespaces.evicted,
            unloaded=self.namespaces.unloaded,
            segment_bytes=sum(one.shared.mapped_bytes() for one in partitions),
        )
