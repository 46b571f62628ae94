"""Speculation middleware: agent workflows run faster, and not one token of their output changes.

Everything public can be taken from here; each name loads its module when it is first used, so that
`import agentspec` itself is quick and imports neither torch nor numpy.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentspec.cache import SuffixCache
    from agentspec.config import Settings, load_settings
    from agentspec.errors import (
        AgentSpecError,
        AuthenticationError,
        CacheClosedError,
        CacheDamagedError,
        CacheError,
        CacheFormatError,
        CacheLockedError,
        CacheNamespaceError,
        CacheUnavailableError,
        CacheVersionError,
        ConfigurationError,
        ContextLengthError,
        EngineError,
        InvalidRequestError,
        KnowledgeBaseError,
        ModelNotFoundError,
        ModelUnavailableError,
        NotReadyError,
        OverloadedError,
        RequestTimeoutError,
        RequestTooLargeError,
        ShuttingDownError,
        UpstreamError,
        UpstreamStatusError,
        UpstreamTimeoutError,
    )
    from agentspec.langchain import ChatAgentSpec
    from agentspec.reasoning.retrieval.knobs import RetrievalSettings
    from agentspec.reasoning.retrieval.ralmspec import ralmspec
    from agentspec.runtime import Runtime
    from agentspec.step import (
        async_httpx_hooks,
        current_labels,
        current_model,
        headers,
        httpx_hooks,
        report,
        step,
        workflow,
    )
    from agentspec.types import (
        Delta,
        Draft,
        FinishReason,
        GenerateRequest,
        Labels,
        Message,
        Namespace,
        Prompt,
        SamplingParams,
        Source,
        Speculation,
        StructuredOutputs,
        TokenLogprob,
        Usage,
    )

    __version__: str

_MODULES = {
    "cache": ("SuffixCache",),
    "config": ("Settings", "load_settings"),
    "errors": (
        "AgentSpecError",
        "AuthenticationError",
        "CacheClosedError",
        "CacheError",
        "CacheDamagedError",
        "CacheFormatError",
        "CacheLockedError",
        "CacheNamespaceError",
        "CacheUnavailableError",
        "CacheVersionError",
        "ConfigurationError",
        "ContextLengthError",
        "EngineError",
        "InvalidRequestError",
        "KnowledgeBaseError",
        "ModelNotFoundError",
        "ModelUnavailableError",
        "NotReadyError",
        "OverloadedError",
        "RequestTimeoutError",
        "RequestTooLargeError",
        "ShuttingDownError",
        "UpstreamError",
        "UpstreamStatusError",
        "UpstreamTimeoutError",
    ),
    "langchain": ("ChatAgentSpec",),
    "reasoning.retrieval.knobs": ("RetrievalSettings",),
    "reasoning.retrieval.ralmspec": ("ralmspec",),
    "runtime": ("Runtime",),
    "step": (
        "async_httpx_hooks",
        "current_labels",
        "current_model",
        "headers",
        "httpx_hooks",
        "report",
        "step",
        "workflow",
    ),
    "types": (
        "Delta",
        "Draft",
        "FinishReason",
        "GenerateRequest",
        "Labels",
        "Message",
        "Namespace",
        "Prompt",
        "SamplingParams",
        "Source",
        "Speculation",
        "StructuredOutputs",
        "TokenLogprob",
        "Usage",
    ),
}

__all__ = [
    "AgentSpecError",
    "AuthenticationError",
    "CacheClosedError",
    "CacheDamagedError",
    "CacheError",
    "CacheFormatError",
    "CacheLockedError",
    "CacheNamespaceError",
    "CacheUnavailableError",
    "CacheVersionError",
    "ChatAgentSpec",
    "ConfigurationError",
    "ContextLengthError",
    "Delta",
    "Draft",
    "EngineError",
    "FinishReason",
    "GenerateRequest",
    "InvalidRequestError",
    "KnowledgeBaseError",
    "Labels",
    "Message",
    "ModelNotFoundError",
    "ModelUnavailableError",
    "Namespace",
    "NotReadyError",
    "OverloadedError",
    "Prompt",
    "RequestTimeoutError",
    "RequestTooLargeError",
    "RetrievalSettings",
    "Runtime",
    "SamplingParams",
    "Settings",
    "ShuttingDownError",
    "Source",
    "Speculation",
    "StructuredOutputs",
    "SuffixCache",
    "TokenLogprob",
    "UpstreamError",
    "UpstreamStatusError",
    "UpstreamTimeoutError",
    "Usage",
    "__version__",
    "async_httpx_hooks",
    "current_labels",
    "current_model",
    "headers",
    "httpx_hooks",
    "load_settings",
    "ralmspec",
    "report",
    "step",
    "workflow",
]

_HOME = {name: module for module, names in _MODULES.items() for name in names}


class _Package(ModuleType):
    """Keeps `agentspec.step` the decorator: importing the module of that name would otherwise replace it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("agentspec")
    elif name in _HOME:
        value = getattr(importlib.import_module(f"agentspec.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module 'agentspec' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
