"""Attention that can be part of a recorded forward: a `StepTable` says which slots it reads.

Here is the operation and what it computes, in plain torch; on a CUDA device Triton kernels compute it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from agentspec.backends.torch.model.batch import grouped_attention
from agentspec.backends.torch.model.graphs.step_table import BEGIN, LAYERS, PAST, POSITIONS, SEES, StepTable


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


@torch.library.custom_op("agentspec::recorded_attention", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, table: Tensor, layer: int, window: int, scale: float) -> Tensor:
    """The attention [1, size, heads, d] of `query` [1, heads, size, d]; writes `key` and `value` [1, kv_heads, size, d]
    to the slots after the committed ones. The layer's rows of `table` begin at `layer`; a `window` of 0 sees all slots.
    Padding gets any result.
    """
    if query.device.type == "cuda":
        from agentspec.backends.torch.model.graphs import attention_triton

        return attention_triton.attend(query, key, value, table, layer, window, scale)
    return attend_plainly(query, key, value, table, layer, window, scale)


def attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, layer: int, window: int, scale: float
) -> Tensor:
    """`attend` in plain torch, on a CPU."""
    result = query.new_zeros(1, query.shape[2], query.shape[1], query.shape[3])
    for number, (begin, count, past) in enumerate(table[BEGIN : PAST + 1].T.tolist()):
        if not count:
            break
        own = slice(begin, begin + count)
        keys, values = (_slots(table, layer, row, number, key, past + count) for row in (0, 1))
        keys[:, :, past:], values[:, :, past:] = key[:, :, own], value[:, :, own]
        mask = _mask(table, own, past, window).to(query.dtype).repeat(query.shape[1] // key.shape[1], 1)
        result[:, own] = grouped_attention(query[:, :, own], keys, values, mask, scale)
    return result


def _slots(table: Tensor, layer: int, row: int, number: int, like: Tensor, count: int) -> Tensor:
    """The first `count` slots [1, kv_heads, count, d] of a sequence, keys (`row` 0) or values (1)."""
    address, apart = int(table[layer + row, number]), int(table[layer + 2, number])
    heads, width = like.shape[1], like.shape[3]
    memory = (ctypes.c_char * (((heads - 1) * apart + count * width) * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided((1, heads, count, width), (0, apart, width, 1))


def _mask(table: Tensor, own: slice, past: int, window: int) -> Tensor:
    positions, flags = table[POSITIONS, own], torch.arange(own.stop - own.start)
    bits = table[SEES + flags // 64][:, own].T >> flags % 64 & 1
    sees = torch.cat([torch.ones(len(flags), past, dtype=torch.bool), bits.bool()], dim=1)
    if window:
        columns = torch.cat([torch.arange(past), positions])
        sees &= columns > positions[:, None] - window
    return torch.zeros(sees.shape).masked_fill_(~sees, -torch.inf)
