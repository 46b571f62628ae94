"""The backend of an embedding model in this process, which answers `/v1/embeddings` and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from agentspec.backends.base import EMBEDDINGS, Capabilities
from agentspec.backends.settings import EncoderSettings
from agentspec.backends.torch.embeddings import SentenceEncoder, Vectors
from agentspec.errors import InvalidRequestError
from agentspec.types import DEFAULT_TENANT, Delta, GenerateRequest


class EncoderBackend:
    """Turns texts into vectors of length 1. Nothing of a text is kept. It owns `encoder`."""

    def __init__(self, encoder: SentenceEncoder) -> None:
        self._encoder = encoder

    @classmethod
    def load(cls, settings: EncoderSettings) -> EncoderBackend:
        """Find and read the model (blocking). Raises `ModelUnavailableError`."""
        return cls(SentenceEncoder.load(settings.model, settings.device))

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(context_length=self._encoder.max_tokens, routes=(EMBEDDINGS,))

    @property
    def dimensions(self) -> int:
        return self._encoder.dimensions

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """Raises `InvalidRequestError`."""
        raise InvalidRequestError("this model embeds texts and answers nothing", param="model")
        yield Delta()

    async def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has; `embed` reads at most `capabilities.context_length` of them."""
        return await asyncio.to_thread(self._encoder.count_tokens, texts)

    async def embed(self, texts: Sequence[str], model: str, tenant: str = DEFAULT_TENANT) -> list[list[float]]:
        """One vector for each text. Raises `ShuttingDownError` once the backend is closed."""
        vectors: Vectors = await asyncio.to_thread(self._encoder.encode_all, texts)
        return [[float(number) for number in vector] for vector in vectors]

    async def aclose(self) -> None:
        await asyncio.to_thread(self._encoder.close)
