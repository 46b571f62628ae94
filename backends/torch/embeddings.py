"""Sentence embeddings: texts as vectors of length 1, from an encoder such as all-MiniLM-L6-v2."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel

from agentspec.backends.base import EMBEDDINGS, Capabilities
from agentspec.backends.torch.engine.compute_thread import compute_thread
from agentspec.backends.torch.engine.tasks import Tasks, on_own_thread
from agentspec.backends.torch.loader import choose_device, choose_kernels, quiet
from agentspec.backends.torch.text.model_text import read_tokenizer
from agentspec.errors import InvalidRequestError, ModelUnavailableError
from agentspec.types import DEFAULT_TENANT, Delta, GenerateRequest

Vectors = NDArray[np.float32]

MAX_TOKENS = 256
BATCH = 32


class SentenceEncoder:
    """An embedding model, also as a backend that stores nothing and answers nothing. It computes in the local engine's
    thread, batch by batch; any thread may call it.
    """

    def __init__(self, model: Any, tokenizer: Any, fingerprint: str) -> None:
        self.max_tokens: int = min(MAX_TOKENS, model.config.max_position_embeddings)
        self.fingerprint = f"{fingerprint}:mean:{self.max_tokens}"
        self.dimensions: int = model.config.hidden_size
        self._model, self._tokenizer = model.eval(), tokenizer
        self._tasks = Tasks(compute_thread(model.device))

    @classmethod
    def load(cls, reference: str, device: str = "auto") -> SentenceEncoder:
        """Load the model of a built-in name, a folder or a model-hub id. Raises `ModelUnavailableError`."""
        from agentspec.backends.model_store import resolve

        def build() -> SentenceEncoder:
            files = resolve(reference)
            try:
                with quiet():
                    model = AutoModel.from_pretrained(files.folder, dtype=torch.float32, use_safetensors=True)
            except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
                message = f"cannot read the embedding model in {str(files.folder)!r}: {error}"
                raise ModelUnavailableError(message) from error
            place = choose_device(device)
            choose_kernels(place)
            return cls(model.to(place), read_tokenizer(files.folder), files.fingerprint)

        return on_own_thread(build)

    async def encode(self, text: str) -> Vectors:
        """The vector [dimensions] of one text, computed in a batch of its own: other requests do not change it."""
        first: Vectors = (await asyncio.wrap_future(self._submit([text])))[0]
        return first

    def encode_all(self, texts: Sequence[str], advance: Callable[[int], None] = lambda done: None) -> Vectors:
        """The vectors [texts, dimensions]; texts of similar length share a batch. Blocks. `advance` is called with the
        size of each finished batch.
        """
        vectors = np.empty((len(texts), self.dimensions), np.float32)
        order = sorted(range(len(texts)), key=lambda at: -len(texts[at]))
        for batch in (order[at : at + BATCH] for at in range(0, len(order), BATCH)):
            vectors[batch] = self._submit([texts[at] for at in batch]).result()
            advance(len(batch))
        return vectors

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(context_length=self.max_tokens, routes=(EMBEDDINGS,))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        raise InvalidRequestError("this model only embeds texts", param="model")
        yield Delta()

    async def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has; those beyond `max_tokens` are not read."""
        read = await asyncio.to_thread(lambda: [self._tokenizer(text, truncation=False) for text in texts])
        return [len(each["input_ids"]) for each in read]

    async def embed(self, texts: Sequence[str], model: str, tenant: str = DEFAULT_TENANT) -> list[list[float]]:
        vectors: Vectors = await asyncio.to_thread(self.encode_all, texts)
        return [[float(number) for number in vector] for vector in vectors]

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        """Fail all waiting calls with `ShuttingDownError`. Idempotent."""
        self._tasks.close()

    def _submit(self, texts: Sequence[str]) -> Future[Vectors]:
        return self._tasks.submit(lambda: self._vectors(texts))

    def _vectors(self, texts: Sequence[str]) -> Vectors:
        options = {"truncation": True, "max_length": self.max_tokens}  # each text alone: all its tokens are made first
        rows = [torch.tensor(self._tokenizer(text, **options)["input_ids"], dtype=torch.long) for text in texts]
        padded = pad_sequence(rows, batch_first=True, padding_value=self._tokenizer.pad_token_id or 0)
        read = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(self._model.device)
        hidden: Tensor = self._model(padded.to(self._model.device), attention_mask=read).last_hidden_state
        mask = read.unsqueeze(-1).to(hidden.dtype)
        means = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
        vectors: Vectors = torch.nn.functional.normalize(means, dim=1).float().cpu().numpy()
        return vectors
