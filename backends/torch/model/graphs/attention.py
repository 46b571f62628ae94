"""Attention that can be part of a recorded forward, in plain torch; on a CUDA device Triton kernels compute it.

A CUDA graph repeats its kernels at the same addresses, but KV slots grow, and sequences come and go. So its kernels
look up in a table on the device, which is filled before each replay, which sequence each token belongs to, where its
slots lie and which of the other new tokens it sees.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache

from agentspec.backends.torch.model.batch import grouped_attention, tree_layout
from agentspec.backends.torch.model.device import to_device

if TYPE_CHECKING:
    from agentspec.backends.torch.model.batch import BatchItem

# Rows of a table. Those of tokens; `SEES` has a second row for the tokens from the 64th on.
IDS, POSITIONS, SEQUENCE, SEES = 0, 1, 2, 3
# Those of sequences: its first token, its number of tokens, its committed slots.
BEGIN, COUNT, PAST = 5, 6, 7
# Then three for each layer, of sequences too: the addresses of its keys and values, and the elements between two heads.
LAYERS = 8
MOST_TOKENS = 128  # of a recorded forward: bits of `SEES`


class StepTable:
    """Fixed memory [8 + 3 * layers, size] that describes the `size` tokens of a recorded forward."""

    def __init__(self, layers: int, size: int, device: torch.device) -> None:
        self._empty = np.zeros((LAYERS + 3 * layers, size), dtype=np.int64)
        self._empty[SEQUENCE] = -1
        self.memory = to_device(self._empty, device).clone()

    @property
    def ids(self) -> Tensor:
        return self.memory[None, IDS]

    @property
    def positions(self) -> Tensor:
        return self.memory[None, POSITIONS]

    def fill(self, items: Sequence[BatchItem], like: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Describe the tokens of `items`, and make room for them; `like` are each layer's new keys and values."""
        table, at = self._empty.copy(), 0
        for number, item in enumerate(items):
            layout, cache = tree_layout(len(item.tokens), item.draft_parents), item.kv_cache
            end = at + len(layout)
            table[IDS, at:end] = (*item.tokens, *item.draft_tokens)
            table[POSITIONS, at:end] = cache.length + layout.depths
            table[SEQUENCE, at:end] = number
            table[SEES : SEES + 2, at:end] = _bits(layout.sees)
            table[[BEGIN, COUNT, PAST], number] = at, len(layout), cache.length
            table[LAYERS:, number] = cache.addresses(like, cache.length + len(layout))
            at = end
        self.memory.copy_(to_device(table, self.memory.device))


def _bits(sees: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Rows of up to 128 flags as two numbers each [2, rows]."""
    wide = np.zeros((len(sees), MOST_TOKENS), dtype=np.bool_)
    wide[:, : len(sees)] = sees
    return np.packbits(wide, axis=1, bitorder="little").view(np.int64).T


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
    """The additive mask [count, past + count] of a sequence's tokens `own`."""
    positions, flags = table[POSITIONS, own], torch.arange(own.stop - own.start)
    bits = table[SEES + flags // 64][:, own].T >> flags % 64 & 1
    sees = torch.cat([torch.ones(len(flags), past, dtype=torch.bool), bits.bool()], dim=1)
    if window:
        columns = torch.cat([torch.arange(past), positions])
        sees &= columns > positions[:, None] - window
    return torch.zeros(sees.shape).masked_fill_(~sees, -torch.inf)
