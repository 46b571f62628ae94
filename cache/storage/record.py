"""What the cache hands to its store."""

from __future__ import annotations

from dataclasses import dataclass

from agentspec.cache.tokens import Tokens
from agentspec.types import Labels, Namespace


@dataclass(frozen=True, slots=True)
class Row:
    """One finished output as it is stored. `sequence` is its number, unique among the processes of a store."""

    sequence: int
    namespace: Namespace
    labels: Labels
    tokens: Tokens
    context: Tokens
    created_at: float
