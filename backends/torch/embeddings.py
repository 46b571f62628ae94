"""Sentence embeddings: texts as vectors of length 1, from an encoder such as all-MiniLM-L6-v2.

A vector is the mean of the last layer over the text's tokens, the pooling of Sentence-BERT (arXiv 1908.10084,
section 3).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel

from agentspec.backends.torch.engine.compute_thread import Tasks, compute_thread, on_own_thread
from agentspec.backends.torch.loader import quiet
from agentspec.backends.torch.model.device import choose_device, choose_kernels
from agentspec.backends.torch.text.tokenizer import read_tokenizer
from agentspec.errors import ModelUnavailableError

Vectors = NDArray[np.float32]

MAX_TOKENS = 256
BATCH = 32
TOKENIZED_AT_ONCE = 1 << 20  # bytes, unless one text has more: all tokens of a text, which take a hundred times as
# many, are made before it is cut
CLOSED = "the embedding model is closed"


class SentenceEncoder:
    """An embedding model. It computes in the local engine's thread, one batch a turn; any thread may call it."""

    def __init__(self, model: Any, tokenizer: Any, fingerprint: str) -> None:
        self.max_tokens: int = min(MAX_TOKENS, model.config.max_position_embeddings)
        self.fingerprint = f"{fingerprint}:mean:{self.max_tokens}"
        self.dimensions: int = model.config.hidden_size
        self._model, self._tokenizer = model.eval(), tokenizer
        self._tasks = Tasks(compute_thread(model.device), refused=CLOSED, dropped=CLOSED)

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
        vectors = await asyncio.wrap_future(self._submit([text]))
        first: Vectors = vectors[0]
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

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """How many tokens each text has; those beyond `max_tokens` are not read."""
        counts: list[int] = []
        for some in _in_groups(texts, TOKENIZED_AT_ONCE):
            counts += [len(ids) for ids in self._tokenizer(some, truncation=False)["input_ids"]]
        return counts

    def close(self) -> None:
        """Fail all waiting calls with `ShuttingDownError`. Idempotent."""
        self._tasks.close()

    def _tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text that are read."""
        read: list[list[int]] = []
        for some in _in_groups(texts, TOKENIZED_AT_ONCE):
            read += self._tokenizer(some, truncation=True, max_length=self.max_tokens)["input_ids"]
        return read

    def _submit(self, texts: Sequence[str]) -> Future[Vectors]:
        return self._tasks.submit(lambda: self._vectors(texts))

    def _vectors(self, texts: Sequence[str]) -> Vectors:
        rows = [torch.tensor(ids, dtype=torch.long) for ids in self._tokens(texts)]
        padded = pad_sequence(rows, batch_first=True, padding_value=self._tokenizer.pad_token_id or 0)
        read = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(self._model.device)
        hidden: Tensor = self._model(padded.to(self._model.device), attention_mask=read).last_hidden_state
        mask = read.unsqueeze(-1).to(hidden.dtype)
        means = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
        vectors: Vectors = torch.nn.functional.normalize(means, dim=1).float().cpu().numpy()
        return vectors


def _in_groups(texts: Sequence[str], most: int) -> Iterator[list[str]]:
    """The texts in order, in groups of at most so many bytes, or of one text."""
    group: list[str] = []
    room = most
    for text in texts:
        size = len(text.encode("utf-8", "replace"))
        if group and size > room:
            yield group
            group, room = [], most
        group.append(text)
        room -= size
    if group:
        yield group
