"""The partitions of one cache with their learned drafting states, under one lock and within one memory budget."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from agentspec.cache.content_filter import ContentFilter
from agentspec.cache.deletion import Decode, Scope
from agentspec.cache.index import SuffixIndex
from agentspec.cache.partition import Partition
from agentspec.cache.record import SequenceRecord
from agentspec.cache.sessions import Session
from agentspec.cache.tokens import Tokens
from agentspec.errors import CacheClosedError
from agentspec.types import Labels, Namespace

BYTES_PER_TOKEN = 32
"""Upper bound of the bytes that an index takes for a token, with room to merge."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot. Counts are since open unless said otherwise; a step is an `extend` that followed a draft."""

    namespaces: int = 0  # now
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
    forgotten: int = 0  # sequences that this process deleted, on request or by age
    refused: int = 0  # outputs not shared because their text matched a pattern
    mode: Literal["memory", "writer", "follower"] = "memory"
    store_error: str | None = None  # why nothing is written now
    unwritten: int = 0  # outputs and updates that the store gave up writing
    segment_error: str | None = None  # why a segment could not be written or used
    damaged: int = 0  # rows of the database that were found unreadable, and are left out


class CachePool:
    """The partitions that the requests, the deletions and the store of one cache work on. Thread-safe.

    `memory_bytes` bounds all partitions, `tenant_memory_bytes` the partitions of each tenant. The pool passes every
    output that it shares to `persist`; sequences get the next of `numbers`.

    Threads take locks in this order: `Deleter.following`; `_sharing`, held from the check that a session is not deleted
    until its output is shared; `_lock`, which guards the tables.
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
        self.limit = memory_bytes
        self._tenant_limit = memory_bytes if tenant_memory_bytes is None else min(memory_bytes, tenant_memory_bytes)
        self._content_filter = content_filter
        self._persist = persist
        self._numbers = count() if numbers is None else numbers
        self._sharing = threading.Lock()
        self._lock = threading.RLock()
        self._partitions: dict[Namespace, Partition] = {}
        self._learned: dict[str, bytes] = {}  # by key, of namespaces that are not in memory
        self._counts: Counter[str] = Counter()
        self.closed = False

    def require_open(self) -> None:
        if self.closed:
            raise CacheClosedError("this cache is closed")

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self._partitions.clear()

    # Sessions and outputs of requests.

    def acquire(self, namespace: Namespace, name: str | None, prompt: Tokens) -> tuple[Partition, Session]:
        """The session of that name, or without a name the session that `prompt` continues, with `prompt` as transcript.

        Only the caller may use the session until `release`.
        """
        with self._lock:
            partition = self.partition(namespace)
            session = partition.sessions.acquire(name, prompt)
            self.count(requests=1)
        try:
            session.begin(prompt, limit=max(1, self._tenant_limit // (2 * BYTES_PER_TOKEN)))
            self.measure(partition, session)
        except BaseException:
            self.release(partition, session)
            raise
        return partition, session

    def measure(self, partition: Partition, session: Session) -> None:
        """Account for a session's growth, and evict if it exceeds the budget."""
        if session.size() == session.measured:
            return
        with self._lock:
            partition.sessions.measure(session)
        self.enforce_budget()

    def release(self, partition: Partition, session: Session, *, keep: bool = True) -> None:
        with self._lock:
            if keep:
                partition.sessions.release(session)
            else:
                partition.sessions.forget(session)

    def add_output(
        self,
        partition: Partition,
        session: Session,
        labels: Labels,
        tokens: Tokens,
        context: Tokens,
        decode: Decode | None,
    ) -> None:
        """Add an output to the cached past outputs, unless its session was deleted or the content filter refuses it."""
        if self._content_filter and self._content_filter.refuses(context, tokens, decode):
            self.count(refused=1)
            return
        with self._sharing:
            if session.forgotten:
                return
            record = SequenceRecord(next(self._numbers), partition.namespace, labels, tokens, context, time.time())
            partition.drafter.observe_end(int(tokens[-1]))
            partition.add(record)
            if self._persist:
                self._persist(record)
        self.enforce_budget()

    def count(self, **counts: int) -> None:
        """Add to the counts of `CacheStats`."""
        with self._lock:
            self._counts.update(counts)

    # Partitions.

    def partition(self, namespace: Namespace) -> Partition:
        """The partition of a namespace; a new partition starts from the namespace's last learned state, if any."""
        with self._lock:
            if namespace not in self._partitions:
                partition = self._partitions[namespace] = Partition(namespace)
                if state := self._learned.get(namespace.key):
                    partition.restore(state)
            return self._partitions[namespace]

    def partitions(self, scope: Scope | None = None) -> list[Partition]:
        """All partitions, or only the partitions of namespaces that `scope` concerns."""
        with self._lock:
            return [one for one in self._partitions.values() if scope is None or scope.concerns(one.namespace)]

    def ingest(self, records: Iterable[SequenceRecord]) -> None:
        """Add sequences from the store that this process does not hold yet."""
        for record in records:
            partition = self.partition(record.namespace)
            if not partition.holds(record.sequence):
                partition.add(record)
        self.enforce_budget()

    def replace_learned(self, learned: Mapping[str, bytes]) -> None:
        """Replace the learned drafting states, by key, from which new partitions start."""
        with self._lock:
            self._learned = dict(learned)

    # Deletions.

    def invalidate_sessions(self, scope: Scope) -> None:
        """Delete the sessions in scope. Outputs of their open requests are not shared any more."""
        with self._sharing, self._lock:
            for partition in self.partitions(scope):
                partition.sessions.invalidate(scope)

    def covered(self, scope: Scope) -> list[tuple[Partition, list[int]]]:
        """The sequences in scope by partition; each is in the store, or waits to be written."""
        with self._sharing:
            return [(partition, partition.covered(scope)) for partition in self.partitions(scope)]

    def forget(self, partition: Partition, sequences: Iterable[int]) -> None:
        """Delete sequences; a partition that is empty then is dropped with its learned state."""
        with self._lock:
            partition.forget(sequences)
            if partition.is_empty:
                self._partitions.pop(partition.namespace, None)

    # Memory.

    def free_bytes(self) -> int:
        """Bytes left in the budget; negative when it is exceeded."""
        return self.limit - self.bytes_by_tenant().total()

    def bytes_by_tenant(self) -> Counter[str]:
        """The bytes that each tenant takes in memory, over all its namespaces."""
        taken: Counter[str] = Counter()
        with self._lock:
            for partition in self._partitions.values():
                taken[partition.namespace.tenant] += partition.memory_bytes()
        return taken

    def enforce_budget(self) -> None:
        """Evict until the measured sizes fit the budget. A tenant over its limit loses only its own entries."""
        with self._lock:
            taken, evicted = self.bytes_by_tenant(), 0
            for tenant, size in taken.items():
                if size > self._tenant_limit:
                    theirs = [one for one in self._partitions.values() if one.namespace.tenant == tenant]
                    evicted += self._reduce(theirs, self._tenant_limit)
            if taken.total() > self.limit:
                evicted += self._reduce(list(self._partitions.values()), self.limit)
            if evicted:
                self.count(evicted=evicted)

    def _reduce(self, partitions: list[Partition], limit: int) -> int:
        """Evict from the largest partition of the largest tenant, so that a flood of requests evicts its own entries.

        Returns how many sequences, sessions and partitions were evicted.
        """
        evicted, kept = 0, 0
        while partitions and (excess := kept + sum(one.memory_bytes() for one in partitions) - limit) > 0:
            taken = self.bytes_by_tenant()
            largest = max(partitions, key=lambda one: (taken[one.namespace.tenant], one.memory_bytes()))
            gone = largest.evict(excess)
            if not gone:
                partitions.remove(largest)
                gone = self._drop_if_empty(largest)
                kept += 0 if gone else largest.memory_bytes()
            evicted += gone
        return evicted

    def _drop_if_empty(self, partition: Partition) -> int:
        if not partition.is_empty:
            return 0
        self._learned[partition.namespace.key] = partition.learned()
        del self._partitions[partition.namespace]
        return 1

    # Inspection.

    def indexes(self) -> list[SuffixIndex]:
        """Every index of every partition and session."""
        with self._lock:
            partitions = self._partitions.values()
            return [one.shared for one in partitions] + [
                session.index for one in partitions for session in one.sessions
            ]

    def stats(self) -> CacheStats:
        """The figures of the cache in memory; the store's fields keep their defaults."""
        with self._lock:
            partitions = self._partitions.values()
            counts: dict[str, Any] = dict(self._counts)
            return CacheStats(
                **counts,
                namespaces=len(partitions),
                sessions=sum(len(one.sessions) for one in partitions),
                sequences=sum(one.shared.sequence_count for one in partitions),
                tokens=sum(one.shared.token_count for one in partitions),
                memory_bytes=sum(one.memory_bytes() for one in partitions),
                segment_bytes=sum(one.shared.mapped_bytes() for one in partitions),
            )
