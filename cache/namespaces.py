"""The namespaces in memory, by tenant: each under its own lock, with running sums of what they take.

Nothing here looks at every tenant or namespace for a request.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, ItemsView
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import TYPE_CHECKING, Generic, TypeVar

from agentspec.cache.deletion import Scope
from agentspec.cache.eviction import Eviction
from agentspec.cache.partition import Partition
from agentspec.types import Namespace

if TYPE_CHECKING:
    from agentspec.cache.sync import StoreSync

AT_ONCE = 16  # so many namespaces are loaded before they are used
TENANT_NAMESPACES = 4096  # of one tenant in memory, unless requests use more of them
_TRIED = 16  # namespaces that are looked at, at most, for one that can leave
_RESERVE = 16  # this part of the budget is left free, for merges and for what comes until others were evicted

K = TypeVar("K")

_order = count()  # keys are never compared


class Totals(Generic[K]):
    """Sizes by key. A change is O(1), `largest` O(log n) for each key that changed since the last call.

    Not thread-safe: the caller has a lock.
    """

    __slots__ = ("_changed", "_heap", "_sizes", "total")

    def __init__(self) -> None:
        self.total = 0
        self._sizes: dict[K, int] = {}
        self._changed: set[K] | None = None  # keys that are not in the heap with their present size
        self._heap: list[tuple[int, int, K]] = []  # (-size, order, key); some of sizes that keys had before

    def __getitem__(self, key: K) -> int:
        return self._sizes.get(key, 0)

    def items(self) -> ItemsView[K, int]:
        return self._sizes.items()

    def add(self, key: K, change: int) -> None:
        """Change a size; keys of size 0 are dropped."""
        if not change:
            return
        size = self._sizes.get(key, 0) + change
        if size:
            self._sizes[key] = size
        else:
            del self._sizes[key]
        self.total += change
        if self._changed is not None:
            (self._changed.add if size else self._changed.discard)(key)

    def largest(self, passed: Collection[K] = ()) -> K | None:
        """The key of the greatest size, those in `passed` left out; None if there is none."""
        self._refresh()
        set_aside = []
        found = None
        while self._heap and found is None:
            size, _, key = entry = self._heap[0]
            if -size == self._sizes.get(key) and key not in passed:
                found = key
            else:
                heappop(self._heap)
                if -size == self._sizes.get(key):
                    set_aside.append(entry)
        for entry in set_aside:
            heappush(self._heap, entry)
        return found

    def _refresh(self) -> None:
        """Bring the heap up to date; from nothing where most of it is out of date."""
        if self._changed is None or len(self._heap) + len(self._changed) > 64 + 4 * len(self._sizes):
            self._heap = [(-size, next(_order), key) for key, size in self._sizes.items()]
            heapify(self._heap)
        else:
            for key in self._changed:
                heappush(self._heap, (-self._sizes[key], next(_order), key))
        self._changed = set()


class _Tenant:
    """One tenant's partitions, least recently used first, and their sizes."""

    __slots__ = ("partitions", "sizes")

    def __init__(self) -> None:
        self.partitions: OrderedDict[Namespace, Partition] = OrderedDict()
        self.sizes: Totals[Namespace] = Totals()


class NamespaceTable:
    """All partitions in memory. Thread-safe.

    `memory_bytes` bounds all partitions, `tenant_memory_bytes` the partitions of each tenant. `lock` guards tables and
    sums; nothing is done under it that takes longer with more text, and no lock is taken. A thread that holds a
    partition's lock may take it. No thread waits for two partitions.
    """

    def __init__(self, memory_bytes: int, tenant_memory_bytes: int | None) -> None:
        self.limit = memory_bytes
        self.tenant_limit = memory_bytes if tenant_memory_bytes is None else min(memory_bytes, tenant_memory_bytes)
        self.watermark = memory_bytes - memory_bytes // _RESERVE
        self.source: StoreSync | None = None
        self.on_pressure: Callable[[], None] = lambda: None
        """Called by a request that leaves work to `Eviction.relieve`; must return at once."""
        self.evicted = 0  # sequences, sessions and namespaces, for good
        self.unloaded = 0
        self.stopping = False  # set when the maintenance thread is about to be ended
        self._count = 0  # partitions
        self.lock = threading.Lock()
        self.tenants: dict[str, _Tenant] = {}
        self.eviction = Eviction(self)
        self.sizes: Totals[str] = Totals()  # by tenant, less what merging will give back
        self.owed = 0  # bytes that merging will give back
        self.due: dict[Partition, None] = {}  # partitions with something to merge
        self._used: dict[Partition, None] = {}

    def clear(self) -> None:
        with self.lock:
            tenants, self.tenants = self.tenants, {}
            self.sizes, self.owed = Totals(), 0
            self.due = {}
            self._used = {}
        tenants.clear()  # what takes time is freed without the lock

    # Partitions.

    def find(self, namespace: Namespace) -> Partition:
        """The partition of a namespace, loaded from the store if it is there; at once it may be retired again."""
        partition = self._find(namespace)
        if self.source and not partition.loaded:
            with partition.lock:
                if not (partition.loaded or partition.retired):
                    self.source.load(partition, self.eviction.room(), partial(self.eviction.reserve, partition))
                self.book(partition)
        return partition

    def _find(self, namespace: Namespace) -> Partition:
        with self.lock:
            tenant = self.tenants.get(namespace.tenant)
            found = tenant.partitions.get(namespace) if tenant else None
            if tenant and found:
                tenant.partitions.move_to_end(namespace)
                return found
        made = Partition(namespace, loaded=self.source is None)
        with self.lock:
            tenant = self.tenants.setdefault(namespace.tenant, _Tenant())
            found = tenant.partitions.setdefault(namespace, made)
            self._count += found is made
            many = len(tenant.partitions) > TENANT_NAMESPACES
            candidates = list(islice(tenant.partitions.values(), _TRIED)) if many else []
        any(self.leave(one) for one in candidates if one is not found)
        return found

    def partitions(self, scope: Scope | None = None) -> list[Partition]:
        """All partitions in memory, or only the partitions of namespaces that `scope` concerns."""
        with self.lock:
            everything = [one for tenant in self.tenants.values() for one in tenant.partitions.values()]
        return [one for one in everything if scope is None or scope.concerns(one.namespace)]

    def loaded(self, namespace: Namespace) -> Partition | None:
        """The partition of a namespace, if it is in memory."""
        with self.lock:
            tenant = self.tenants.get(namespace.tenant)
            found = tenant.partitions.get(namespace) if tenant else None
        return found if found and found.loaded else None

    def preload(self, namespace: Namespace) -> Partition | None:
        """Load a namespace before it is used, as long as there are few and memory is half empty."""
        if self._count >= AT_ONCE or 2 * self.sizes.total >= self.limit:
            return None
        partition = self.find(namespace)
        self.settle(partition)
        return partition

    def take_used(self) -> list[Partition]:
        """What was loaded or changed since the last call, or has had open requests since; for caches on disk."""
        with self.lock:
            used = list(self._used)
            self._used = {one: None for one in used if one.sessions.busy}
        return used

    # Memory.

    @property
    def total(self) -> int:
        """Bytes that all partitions take, deleted text that is not merged away included."""
        return self.sizes.total + self.owed

    def bytes_by_tenant(self) -> Counter[str]:
        """The bytes that each tenant takes in memory, over all its namespaces, without what was deleted."""
        with self.lock:
            return Counter(dict(self.sizes.items()))

    def settle(self, partition: Partition) -> None:
        """Account for what a partition takes now, and evict if a budget is exceeded."""
        with partition.lock:
            self.book(partition)
        taken = self.sizes[partition.namespace.tenant]
        if taken > self.tenant_limit or self.sizes.total > self.watermark or self.total > self.limit:
            self.eviction.restore(partition)

    def book(self, partition: Partition) -> None:
        """Account for a partition's size. The caller holds its lock."""
        if partition.retired:
            return
        owed = partition.shared.reclaimable_bytes()
        due, size = partition.shared.merging_due, partition.memory_bytes() - owed
        with self.lock:
            self._account(partition, size, owed)
            if self.source:
                self._used[partition] = None
            if first := due and partition not in self.due:
                self.due[partition] = None
        if first:
            self.on_pressure()

    def _account(self, partition: Partition, size: int, owed: int = 0) -> None:
        tenant = self.tenants.get(partition.namespace.tenant)
        if tenant is None or partition.retired:
            return
        tenant.sizes.add(partition.namespace, size - partition.measured)
        self.sizes.add(partition.namespace.tenant, size - partition.measured)
        self.owed += owed - partition.owed
        partition.measured, partition.owed = size, owed

    def leave(self, partition: Partition) -> bool:
        """Take a namespace out of memory as a whole, unless a request uses it."""
        if not partition.lock.acquire(blocking=False):
            return False
        try:
            if partition.retired or partition.sessions.busy:
                return False
            self.retire(partition)
        finally:
            partition.lock.release()
        with self.lock:
            self.unloaded += 1
        return True

    def retire(self, partition: Partition) -> None:
        """Let a partition leave memory. The caller holds its lock."""
        with self.lock:
            self._account(partition, 0)
            partition.retired = True
            self.due.pop(partition, None)
            self._used.pop(partition, None)
            tenant = self.tenants.get(partition.namespace.tenant)
            if tenant and tenant.partitions.get(partition.namespace) is partition:
                del tenant.partitions[partition.namespace]
                self._count -= 1
                if not tenant.partitions:
                    del self.tenants[partition.namespace.tenant]
