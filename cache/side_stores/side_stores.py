"""Opens the stores beside a cache's sequences, in its database or in memory, and keeps all of them in order."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentspec.cache.content_filter import ContentFilter
from agentspec.cache.deletion import Selection
from agentspec.cache.responses import MemoryResponses, ResponseLimits, ResponseStore
from agentspec.cache.tool_turns import MemoryToolTurns, ToolTurnStore
from agentspec.cache.usage import MemoryUsage, UsageStore

if TYPE_CHECKING:
    from agentspec.cache.storage.sequence_store import SequenceStore

_TOOL_TURN_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class SideStores:
    """The stores beside a cache's sequences, each to be used as its own interface says."""

    responses: ResponseStore
    tool_turns: ToolTurnStore
    usage: UsageStore

    @classmethod
    def open(
        cls,
        store: SequenceStore | None,
        *,
        responses: ResponseLimits,
        retention: float | None,
        content_filter: ContentFilter | None,
        usage_days: int,
    ) -> SideStores:
        """The stores in the database of `store`, whose deletions reach them too; in memory without a store.

        What `content_filter` matches never comes in. Turns older than `retention` seconds go; they take at most half of
        the room of responses. Usage is kept for `usage_days` days.
        """
        refuses = content_filter.matches if content_filter else None
        if store is None:
            answers = MemoryResponses(responses, refuses)
            return cls(answers, MemoryToolTurns(refuses, retention), MemoryUsage(usage_days))
        # These need SQLAlchemy, which a cache in memory does not load.
        from agentspec.cache.responses.table import DatabaseResponses
        from agentspec.cache.tool_turns.table import DatabaseToolTurns
        from agentspec.cache.usage.table import DatabaseUsage

        database = store.database
        most = min(_TOOL_TURN_BYTES, responses.total // 2)
        tables = (
            DatabaseResponses(database, responses, refuses),
            DatabaseToolTurns(database, refuses, retention, most, min(most, responses.tenant or most)),
            DatabaseUsage(database, usage_days),
        )
        store.also_forgets += [table.forget_within for table in tables]
        return cls(*tables)

    def forget(self, selection: Selection) -> None:
        """Delete what the selection covers. In a database the deletion of the sequences does so itself."""
        for one in (self.responses, self.tool_turns, self.usage):
            one.forget(selection)

    def maintain(self) -> None:
        """Delete what is too old or too much, in each store whatever fails in others. To be called now and then."""
        with ExitStack() as done:
            for one in (self.responses, self.tool_turns, self.usage):
                done.callback(one.maintain)
