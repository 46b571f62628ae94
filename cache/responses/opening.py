"""Opens the store of responses that belongs to a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentspec.cache.responses.memory import MemoryResponses
from agentspec.cache.responses.stored import ResponseLimits, ResponseStore

if TYPE_CHECKING:
    from agentspec.cache.storage.sequence_store import SequenceStore


def open_responses(store: SequenceStore | None, limits: ResponseLimits) -> ResponseStore:
    """The responses beside the sequences of `store`, whose deletions take them along; in memory without a store."""
    if store is None:
        return MemoryResponses(limits)
    from agentspec.cache.responses.table import DatabaseResponses

    table = DatabaseResponses(store.database, limits)
    store.also_forgets.append(table.forget_within)
    return table
