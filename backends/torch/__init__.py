"""The local engine: any Hugging Face decoder-only model, with exact speculation (docs/engine.md)."""

from agentspec.backends.torch.backend import TorchBackend
from agentspec.backends.torch.engine.stats import EngineStats

__all__ = ["EngineStats", "TorchBackend"]
