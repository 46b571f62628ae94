"""What agents' turns taught about tool calls, in the cache's database, or in memory without one."""

from agentspec.cache.tool_turns.turn import StoredTurn, new_turn

__all__ = ["StoredTurn", "new_turn"]
