"""Stored answers of the Responses API, by id and tenant."""

from agentspec.cache.responses.stored import KeepsResponses, ResponseLimits, ResponseStore, StoredResponse

__all__ = ["KeepsResponses", "ResponseLimits", "ResponseStore", "StoredResponse"]
