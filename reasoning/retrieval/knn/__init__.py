"""KNN-LM: mixes a local model's next-token distribution with the tokens after similar hidden states in a corpus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentspec.reasoning.settings import KnnSettings

if TYPE_CHECKING:
    from agentspec.reasoning.retrieval.knn.backend import KnnBackend

__all__ = ["KnnBackend", "KnnSettings"]


def __getattr__(name: str) -> Any:
    """Import `KnnBackend` on first use, so that the settings can be read without numpy."""
    if name != "KnnBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agentspec.reasoning.retrieval.knn.backend import KnnBackend

    return KnnBackend
