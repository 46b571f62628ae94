"""Runs transformers' `generate` as its users do: in its own process, with all cores and without an engine.

Two models in one process would compute on two threads, whose worker pools slow each other down even while one model is
idle.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from agentspec.backends.torch import TorchBackend

_model: Any = None  # set only in the peer's process
_kept: tuple[list[int], Any] = ([], None)  # also: the tokens and the KV cache of the latest answer


class TransformersPeer:
    """A model with the same weights, device and arithmetic under plain transformers. `close` ends its process."""

    def __init__(self, folder: Path, *, device: str, dtype: str) -> None:
        self._process = ProcessPoolExecutor(1, get_context("spawn"), _load, (folder, device, dtype))

    @classmethod
    def beside(cls, backend: TorchBackend, model: str) -> TransformersPeer:
        """Start transformers with `model`, on the device and with the arithmetic of `backend`."""
        from agentspec.backends.model_store import resolve

        engine = backend.stats()
        return cls(resolve(model).folder, device=engine.device, dtype=engine.dtype)

    def generate(self, prompt: Sequence[int], max_tokens: int, **options: int) -> tuple[tuple[int, ...], float]:
        """A greedy answer to `prompt`, and the seconds it took, prefill included. `options` go to `generate`."""
        return self._process.submit(_generate, list(prompt), max_tokens, options).result()

    def continue_from(self, prompt: Sequence[int], max_tokens: int) -> tuple[tuple[int, ...], float]:
        """Like `generate`, but reuses the previous call's KV cache for the prefix that it shares with `prompt`."""
        return self._process.submit(_continue, list(prompt), max_tokens).result()

    def close(self) -> None:
        self._process.shutdown()


def _load(folder: Path, device: str, dtype: str) -> None:
    global _model
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    quiet: Any = logging
    quiet.disable_progress_bar()
    _model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    _model.to(device).eval()


def _generate(prompt: list[int], max_tokens: int, options: dict[str, Any]) -> tuple[tuple[int, ...], float]:
    import torch

    ids = torch.tensor([prompt], device=_model.device)
    start = time.perf_counter()
    with torch.inference_mode():
        output = _model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, **options
        )
    seconds = time.perf_counter() - start
    return tuple(output[0, len(prompt) :].tolist()), seconds


def _continue(prompt: list[int], max_tokens: int) -> tuple[tuple[int, ...], float]:
    global _kept
    from transformers import DynamicCache

    from agentspec.backends.torch.engine.prefix_cache import common_prefix

    start = time.perf_counter()
    text, rows = _kept
    shared = min(common_prefix(np.asarray(text), np.asarray(prompt)), len(prompt) - 1)
    if not shared:
        rows = DynamicCache(config=_model.config)
    elif shared < len(text):
        rows.crop(shared - len(text))
    tokens, _ = _generate(prompt, max_tokens, {"past_key_values": rows})
    _kept = ([*prompt, *tokens][: rows.get_seq_length()], rows)
    return tokens, time.perf_counter() - start
