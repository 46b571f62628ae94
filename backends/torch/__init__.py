"""The local engine: Hugging Face decoder-only models, with exact speculation (docs/engines.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentspec.backends.torch.backend import TorchBackend
    from agentspec.backends.torch.engine.stats import EngineStats

__all__ = ["EngineStats", "TorchBackend"]


def __getattr__(name: str) -> Any:
    """Import on first use: a command that only tokenizes need not wait seconds for models to be importable."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agentspec.backends.torch import backend
    from agentspec.backends.torch.engine import stats

    return getattr(backend if name == "TorchBackend" else stats, name)
