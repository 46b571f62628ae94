"""Attention that can be part of a recorded forward: a `StepTable` says which slots it reads.

Triton kernels compute it; `tests/backends/torch/model/graphs/plain.py` is the same in plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from agentspec.backends.torch.model.graphs.step_table import LAYERS, StepTable


class RecordedCache(Cache):
    """Stands in for a model's cache in a recorded forward. `like` are the new keys and values of each layer."""

    def __init__(self, table: StepTable, windows: Sequence[int | None]) -> None:
        super().__init__(layers=[])
        self.like: list[tuple[Tensor, Tensor]] = []
        self._table, self._windows = table, windows

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[RecordedAttention, RecordedAttention]:
        assert len(self.like) == layer_idx, "layers are not run in their order"
        self.like.append((key_states, value_states))
        rows = RecordedAttention(key_states, value_states, self._table.memory, layer_idx, self._windows[layer_idx])
        return rows, rows

    def __bool__(self) -> bool:
        return True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class RecordedAttention:
    """What a layer's queries attend to: its new keys and values [1, kv_heads, size, d], and the slots in the table."""

    def __init__(self, key: Tensor, value: Tensor, table: Tensor, layer: int, window: int | None) -> None:
        self._rows = key, value, table, LAYERS + 3 * layer, window or 0

    def attend(self, query: Tensor, scaling: float | None) -> Tensor:
        out: Tensor = attend(query, *self._rows, query.shape[-1] ** -0.5 if scaling is None else scaling)
        return out


@torch.library.custom_op("agentspec::recorded_attention", mutates_args=(), device_types="cuda")
def attend(query: Tensor, key: Tensor, value: Tensor, table: Tensor, layer: int, window: int, scale: float) -> Tensor:
    """The attention [1, size, heads, d] of `query` [1, heads, size, d]; writes `key` and `value` [1, kv_heads, size, d]
    to the slots after the committed ones. The layer's rows of `table` begin at `layer`; a `window` of 0 sees all slots.
    Padding gets any result.
    """
    from agentspec.backends.torch.model.graphs import attention_triton

    return attention_triton.attend(query, key, value, table, layer, window, scale)
