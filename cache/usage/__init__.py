"""What tenants' keys used by day and model: in the cache's database, or in memory without one."""

from agentspec.cache.usage.memory import MemoryUsage
from agentspec.cache.usage.row import COUNTS, KeepsUsage, UsageRow, UsageStore, day_of

__all__ = ["COUNTS", "KeepsUsage", "MemoryUsage", "UsageRow", "UsageStore", "day_of"]
