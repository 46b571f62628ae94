"""Stored answers of the Responses API, by id and tenant: in the cache's database, or in memory without one."""

from agentspec.cache.responses.memory import MemoryResponses
from agentspec.cache.responses.stored import KeepsResponses, ResponseLimits, ResponseStore, StoredResponse

__all__ = ["KeepsResponses", "MemoryResponses", "ResponseLimits", "ResponseStore", "StoredResponse"]
