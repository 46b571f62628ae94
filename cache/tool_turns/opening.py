"""Opens the store of turns that belongs to a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentspec.cache.content_filter import ContentFilter
from agentspec.cache.tool_turns.memory import MemoryToolTurns
from agentspec.cache.tool_turns.turn import ToolTurnStore

if TYPE_CHECKING:
    from agentspec.cache.storage.sequence_store import SequenceStore

_BYTES = 32 << 20


def open_tool_turns(
    store: SequenceStore | None,
    retention: float | None,
    content_filter: ContentFilter | None,
    room: int,
    tenant_room: int | None,
) -> ToolTurnStore:
    """The turns beside the sequences of `store`, whose deletions take them along; in memory without a store.

    They take at most `room` bytes, `tenant_room` of one tenant.
    """
    refuses = content_filter.matches if content_filter else None
    if store is None:
        return MemoryToolTurns(refuses, retention)
    from agentspec.cache.tool_turns.table import DatabaseToolTurns

    most = min(_BYTES, room)
    table = DatabaseToolTurns(store.database, refuses, retention, most, min(most, tenant_room or most))
    store.also_forgets.append(table.forget_within)
    return table
