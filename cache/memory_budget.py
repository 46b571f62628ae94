"""Keeping the indexes within their budgets: a tenant over its share loses what is its own, nobody else's."""

from __future__ import annotations

from collections import Counter

from agentspec.cache.partition import Space
from agentspec.types import Namespace


class MemoryBudget:
    """`limit` bounds the bytes of all spaces, `tenant_limit` each tenant's. The caller holds the cache's lock."""

    def __init__(
        self, spaces: dict[Namespace, Space], learned: dict[str, bytes], limit: int, tenant_limit: int | None
    ) -> None:
        self._spaces = spaces
        self._learned = learned
        self.limit = limit
        self._tenant_limit = tenant_limit

    @property
    def most(self) -> int:
        """Bytes that one tenant may take."""
        return self.limit if self._tenant_limit is None else min(self.limit, self._tenant_limit)

    def taken(self) -> int:
        return sum(space.memory_bytes() for space in self._spaces.values())

    def by_tenant(self) -> Counter[str]:
        taken: Counter[str] = Counter()
        for namespace, space in self._spaces.items():
            taken[namespace.tenant] += space.memory_bytes()
        return taken

    def enforce(self) -> int:
        """Evict until what was measured fits; returns how many sequences, sessions and spaces went."""
        taken = self.by_tenant()
        evicted = 0
        for tenant, size in taken.items():
            if size > self.most:
                evicted += self._reduce(
                    [space for key, space in self._spaces.items() if key.tenant == tenant], self.most
                )
        return evicted + (self._reduce(list(self._spaces.values()), self.limit) if taken.total() > self.limit else 0)

    def _reduce(self, spaces: list[Space], limit: int) -> int:
        """The tenant that takes most gives, from its largest space: a flood pushes out its own past."""
        evicted, kept = 0, 0
        while spaces and (excess := kept + sum(space.memory_bytes() for space in spaces) - limit) > 0:
            taken = self.by_tenant()
            space = max(spaces, key=lambda space: (taken[space.namespace.tenant], space.memory_bytes()))
            count = space.evict(excess)
            if not count:
                spaces.remove(space)
                count = self._forget_if_empty(space)
                kept += 0 if count else space.memory_bytes()
            evicted += count
        return evicted

    def _forget_if_empty(self, space: Space) -> int:
        if len(space.sessions) or space.shared.sequence_count:
            return 0
        self._learned[space.namespace.key] = space.learned()
        del self._spaces[space.namespace]
        return 1
