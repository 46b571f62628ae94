"""Positions and attention masks of a forward's tokens: committed slots, then new tokens, then a draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentspec.backends.torch.model.device import to_device

CPU = torch.device("cpu")
ALIGNED = 16  # columns; CUDA kernels first copy a mask whose rows do not begin at multiples of this


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """The L tokens of one forward: `depths[i]` is token i's position relative to the first, and `sees[i, j]` says
    whether token i attends to token j; each attends to itself.
    """

    depths: NDArray[np.int64]
    sees: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.depths)


def tree_layout(num_tokens: int, parents: Sequence[int]) -> TreeLayout:
    """The layout of `num_tokens` consecutive tokens and then tree nodes. A node's parent is another node's index, or
    -1 for the last of the tokens.
    """
    total = num_tokens + len(parents)
    depths = np.arange(total, dtype=np.int64)
    sees = np.tri(total, dtype=np.bool_)
    for node, parent in enumerate(parents):
        row, above = num_tokens + node, num_tokens + parent
        depths[row] = depths[above] + 1
        sees[row] = sees[above]
        sees[row, row] = True
    return TreeLayout(depths, sees)


def first_visible(past: int, window: int | None) -> int:
    """The first committed slot that a token after `past` committed slots can see."""
    return 0 if window is None else max(0, past - window + 1)


def attention_mask(
    layout: TreeLayout,
    past: int,
    *,
    window: int | None,
    groups: int,
    dtype: torch.dtype,
    first: int = 0,
    device: torch.device = CPU,
) -> Tensor:
    """The additive mask [1, 1, groups * L, past + L - first] of a layer that looks back `window` positions (None: all).

    Columns begin at committed slot `first`. A committed slot's column is given by its position, but a tree node's
    column is not. Distances are therefore taken between positions, never between columns.
    """
    known, size, lowest = past - first, len(layout), torch.finfo(dtype).min
    width = known + size
    room = torch.zeros(groups, size, -(-width // ALIGNED) * ALIGNED, dtype=dtype, device=device)
    mask = room[:, :, :width]
    mask[:, :, known:].masked_fill_(to_device(~layout.sees, device), lowest)
    if window is not None:
        positions = to_device(past + layout.depths, device)
        columns = torch.cat([torch.arange(first, past, device=device), positions])
        mask.masked_fill_(columns[None, :] <= positions[:, None] - window, lowest)
    return mask.view(1, 1, groups * size, width)
