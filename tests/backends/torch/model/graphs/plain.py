"""The attention of recorded forwards in plain torch: what the Triton kernels compute."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from agentspec.backends.torch.model.batch import grouped_attention
from agentspec.backends.torch.model.graphs.attention import attend
from agentspec.backends.torch.model.graphs.step_table import BEGIN, PAST, POSITIONS, SEES


@attend.register_kernel("cpu")
def attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, layer: int, window: int, scale: float
) -> Tensor:
    """`attend`, which the model runs on a CPU while it is recorded in tests."""
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
