"""Describes the tokens of a recorded forward.

A CUDA graph repeats its kernels at the same addresses, but KV slots grow, and sequences come and go. So its kernels
look up in a table on the device, which is filled before each replay, which sequence each token belongs to, where its
slots lie and which of the other new tokens it sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentspec.backends.torch.model.batch import tree_layout
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
