"""Any OpenAI-compatible endpoint as a backend, and as an upstream whose answers a gateway forwards unchanged."""

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
