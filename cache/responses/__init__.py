"""Stored answers of the Responses API, by id and tenant."""

from agentspec.cache.responses.stored import ResponseLimits, StoredResponse

__all__ = ["ResponseLimits", "StoredResponse"]
