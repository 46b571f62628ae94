"""The token cache: stores the tokens of past outputs and drafts the tokens that are likely to come next."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentspec.cache.suffix_cache import CacheRequest, CacheStats, SuffixCache

__all__ = ["CacheRequest", "CacheStats", "SuffixCache"]


def __getattr__(name: str) -> Any:
    """Import on first use: settings can be read without numpy and the native extension."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("agentspec.cache.suffix_cache"), name)
