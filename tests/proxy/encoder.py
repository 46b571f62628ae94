"""An encoder that gives every text the same vector, for tests of the routes before it."""

from __future__ import annotations

from typing import Any

from agentspec.backends.base import Capabilities
from agentspec.testing import FakeBackend


class ConstantEncoder(FakeBackend):
    dimensions = 3

    def __init__(self) -> None:
        super().__init__(capabilities=Capabilities(context_length=8, routes=("/embeddings",)))

    async def count_tokens(self, texts: Any) -> list[int]:
        return [len(text.split()) for text in texts]

    async def embed(self, texts: Any, model: str, tenant: str = "") -> list[list[float]]:
        return [[1.0, 0.0, 0.0] for _ in texts]
