"""Opens the store of usage that belongs to a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentspec.cache.usage.memory import MemoryUsage
from agentspec.cache.usage.row import UsageStore

if TYPE_CHECKING:
    from agentspec.cache.storage.sequence_store import SequenceStore


def open_usage(store: SequenceStore | None, days: int) -> UsageStore:
    """The usage of the last `days` days beside the sequences of `store`; in memory without a store."""
    if store is None:
        return MemoryUsage(days)
    from agentspec.cache.usage.table import DatabaseUsage

    table = DatabaseUsage(store.database, days)
    store.also_forgets.append(table.forget_within)
    return table
