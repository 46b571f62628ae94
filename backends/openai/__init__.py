"""Any OpenAI-compatible endpoint as a backend, and as an upstream whose bytes a gateway passes on."""

from agentspec.backends.http import UpstreamResponse
from agentspec.backends.openai.backend import OpenAIBackend
from agentspec.backends.openai.probe import ProbeReport
from agentspec.backends.openai.vllm import VllmReport
from agentspec.backends.openai.vllm_metrics import DraftCounts, DrafterInfo, ServerMetrics

__all__ = [
    "DraftCounts",
    "DrafterInfo",
    "OpenAIBackend",
    "ProbeReport",
    "ServerMetrics",
    "UpstreamResponse",
    "VllmReport",
]
