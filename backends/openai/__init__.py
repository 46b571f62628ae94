"""Any OpenAI-compatible endpoint as a backend, and as an upstream whose bytes a gateway passes on."""

from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.openai.http import UpstreamResponse
from agentspec.backends.openai.probe import ProbeReport

__all__ = ["OpenAIBackend", "ProbeReport", "UpstreamResponse"]
