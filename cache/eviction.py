"""What goes when memory is full: the least recently used of the largest namespace of the largest tenant."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from itertools import islice
from typing import TYPE_CHECKING

from agentspec.cache.partition import Partition
from agentspec.types import Namespace

if TYPE_CHECKING:
    from agentspec.cache.namespaces import NamespaceTable

_IDLE_SECONDS = 60.0  # a namespace that no request used for so long may leave memory as a whole
_PATIENCE = 1.0  # seconds that loading waits, at most, for memory that others have given up but not merged away
_READING = 0.001  # seconds until merges are tried again that drafts held up, or that have come up meanwhile
_PIECES = 8  # that a request merges at a time, where memory is full: the maintenance thread does the rest
_TRIED = 16  # namespaces that are looked at, at most, for one that can give something


class Eviction:
    """Keeps the namespaces of a table within its limits. Thread-safe; no request waits for another tenant's lock."""

    def __init__(self, table: NamespaceTable) -> None:
        self._table = table

    def restore(self, partition: Partition) -> None:
        """Evict what one partition takes too much, or all together. The caller holds no lock.

        A tenant evicts its own; what another has to give is left to `relieve` as long as there is room.
        """
        tenant = partition.namespace.tenant
        self._limit(tenant)
        if self._over() > 0:
            with self._table.lock:
                largest = self._table.sizes.largest()
            if largest == tenant:
                self._reduce(self._over, tenant)
            else:
                self._table.on_pressure()
            self._reduce(lambda: self._table.sizes.total - self._table.limit, None, wait=False)
            self._reduce(lambda: self._table.sizes.total - self._table.limit, tenant)
        if self._table.total > self._table.limit:
            self._give_back(partition)

    def relieve(self) -> None:
        """Evict until the reserve is free again, and merge what is due. Called by the maintenance thread."""
        self._reduce(self._over, None)
        with self._table.lock:
            due, self._table.due = list(self._table.due), {}
        for partition in due:
            partition.merge(lambda: self._table.stopping)
            with partition.lock:
                self._table.book(partition)
            self._limit(partition.namespace.tenant)  # a merged run can take some bytes more, for its table
        self._reduce(self._over, None)
        if self._table.due:
            time.sleep(_READING)

    def _limit(self, tenant: str) -> None:
        self._reduce(lambda: self._table.sizes[tenant] - self._table.tenant_limit, tenant)

    def _over(self) -> int:
        return self._table.sizes.total - self._table.watermark

    def room(self) -> int:
        """Bytes that a namespace may take that is loaded: what is free, or half of what the largest has to give."""
        with self._table.lock:
            largest = self._table.sizes.largest()
            most = self._table.sizes[largest] if largest is not None else 0
            return min(self._table.tenant_limit, max(-self._over(), most // 2))

    def reserve(self, partition: Partition, wanted: int) -> int:
        """Take `wanted` bytes from others for a partition that is being loaded; returns how many it may take.

        The caller holds its lock. Others that are in use at the moment keep what they have.
        """
        table = self._table
        table.book(partition)
        tenant, own = partition.namespace.tenant, {partition.namespace}
        until = time.monotonic() + _PATIENCE
        while True:
            self._reduce(lambda: table.sizes[tenant] + wanted - table.tenant_limit, tenant, wait=False, passed=own)
            self._reduce(lambda: self._over() + wanted, None, wait=False, passed=own)
            self._give_back(partition, wanted)
            free = min(
                -self._over(),
                table.limit - table.total,
                table.tenant_limit - table.sizes[tenant],
            )
            if free >= wanted or not table.owed or time.monotonic() >= until:
                return max(0, free)
            time.sleep(_READING)

    def _give_back(self, partition: Partition, wanted: int = 0) -> None:
        """Merge some of its own namespace, then of others that no thread merges at the moment, for `wanted` bytes."""
        with self._table.lock:
            others = list(islice(self._table.due, _TRIED))
        for one in (partition, *others):
            for _ in range(_PIECES):
                if self._table.total + wanted <= self._table.limit:
                    return
                merged = one.merge_piece(wait=one is partition)
                if one.lock.acquire(blocking=one is partition):
                    try:
                        self._table.book(one)
                    finally:
                        one.lock.release()
                if not merged:
                    break

    def _reduce(
        self, excess: Callable[[], int], tenant: str | None, *, wait: bool = True, passed: Collection[Namespace] = ()
    ) -> None:
        """Evict from the largest namespace of `tenant`, or else of the largest tenant, until `excess()` is 0.

        A flood of requests evicts its own entries so. Those in `passed` are left out, and without `wait` namespaces
        that are in use at the moment, so that no request waits for another tenant.
        """
        passed = set(passed)
        drained: set[str] = set()
        while excess() > 0 and len(passed) < _TRIED:
            with self._table.lock:
                victim = self._victim(tenant, passed, drained)
            if victim is None:
                return
            if not self._evict(victim, excess, wait):
                passed.add(victim.namespace)

    def _victim(self, tenant: str | None, passed: set[Namespace], drained: set[str]) -> Partition | None:
        """What gives next: a namespace that can leave as a whole, else the largest. The caller holds `_lock`."""
        if tenant is not None:
            return self._victim_of(tenant, passed)
        while (chosen := self._table.sizes.largest(drained)) is not None:
            if found := self._victim_of(chosen, passed):
                return found
            drained.add(chosen)
        return None

    def _victim_of(self, tenant: str, passed: set[Namespace]) -> Partition | None:
        theirs = self._table.tenants.get(tenant)
        if theirs is None:
            return None
        oldest = next(iter(theirs.partitions.values()))
        if oldest.namespace not in passed and self._may_leave(oldest):
            return oldest
        largest = theirs.sizes.largest(passed)
        return None if largest is None else theirs.partitions[largest]

    def _evict(self, victim: Partition, excess: Callable[[], int], wait: bool) -> bool:
        """Evict some of a partition, or all of one that is idle; returns whether anything went."""
        if not victim.lock.acquire(blocking=wait):
            return False
        try:
            self._table.book(victim)
            over = excess()
            if over <= 0 or victim.retired or (self._may_leave(victim) and self._table.leave(victim)):
                return True
            gone = victim.evict(min(over, victim.measured // 4))  # the next may be larger then
            if not gone and victim.is_empty:
                self._table.retire(victim)
                gone = 1
            self._table.book(victim)
            with self._table.lock:
                self._table.evicted += gone
            return bool(gone)
        finally:
            victim.lock.release()

    def _may_leave(self, partition: Partition) -> bool:
        """Whether a namespace is idle and would be found again in the store."""
        return (
            partition.idle_since(_IDLE_SECONDS) and self._table.source is not None and self._table.source.can_reload()
        )
