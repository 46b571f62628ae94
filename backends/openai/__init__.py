"""Any OpenAI-compatible endpoint as a backend, and as an upstream whose answers a gateway forwards unchanged."""

from agentspec.backends.http import UpstreamResponse
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.openai.isolation import TenantIsolation
from agentspec.backends.openai.metrics import DrafterInfo
from agentspec.backends.openai.probe import ProbeReport

__all__ = ["DrafterInfo", "OpenAIBackend", "ProbeReport", "TenantIsolation", "UpstreamResponse"]
