"""Stored answers of the Responses API, by id and tenant: in the cache's database, or in memory without one."""

from agentspec.cache.responses.memory import MemoryResponses
from agentspec.cache.responses.stored import ResponseLimits, ResponseStore, StoredResponse

__all__ = ["MemoryResponses", "ResponseLimits", "ResponseStore", "StoredResponse"]
