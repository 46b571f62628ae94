"""An encoder whose vectors count letters, for tests of the routes that lead to it."""

from __future__ import annotations

from typing import Any

from agentspec.backends.base import EMBEDDINGS, Capabilities
from agentspec.testing import FakeBackend


class CountingEncoder(FakeBackend):
    """One dimension each for `a`, `b` and the rest; a token is a word, of which 8 are read."""

    dimensions = 3

    def __init__(self) -> None:
        super().__init__(capabilities=Capabilities(context_length=8, routes=(EMBEDDINGS,)))

    async def count_tokens(self, texts: Any) -> list[int]:
        return [len(text.split()) for text in texts]

    async def embed(self, texts: Any, model: str, tenant: str = "") -> list[list[float]]:
        return [[text.count("a") / 4, text.count("b") / 4, len(text) / 4] for text in texts]
