"""An encoder without a model."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence

import anyio
import numpy as np
from numpy.typing import NDArray


class FakeEncoder:
    """An `Encoder` without a model: each word has a random vector, and a text has the direction of their sum.

    `encoded` lists the texts passed to `encode`; each such call takes `latency` seconds.
    """

    def __init__(self, dimensions: int = 16, *, latency: float = 0.0) -> None:
        self.dimensions = dimensions
        self.fingerprint = f"fake-{dimensions}"
        self.encoded: list[str] = []
        self.closed = False
        self._latency = latency

    async def encode(self, text: str) -> NDArray[np.float32]:
        await anyio.sleep(self._latency)
        self.encoded.append(text)
        return self._vector(text)

    def encode_all(
        self, texts: Sequence[str], advance: Callable[[int], None] = lambda done: None
    ) -> NDArray[np.float32]:
        vectors = [self._vector(text) for text in texts]
        advance(len(vectors))
        return np.stack(vectors)

    def close(self) -> None:
        self.closed = True

    def _vector(self, text: str) -> NDArray[np.float32]:
        words = re.findall(r"\w+", text.lower()) or [""]
        seeds = [zlib.crc32(word.encode()) for word in words]
        total = sum(np.random.default_rng(seed).standard_normal(self.dimensions) for seed in seeds)
        return np.asarray(total / np.linalg.norm(total), np.float32)
