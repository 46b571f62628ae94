"""Tokens as digits, which pass through hidden states of 16 bits unchanged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BASE = 256  # a token stands as three digits, each of which is exact in bfloat16
DIGITS = 3


def digits(tokens: Sequence[int]) -> Tensor:
    """The tokens as rows of their digits, the highest first: (tokens, DIGITS)."""
    values = torch.tensor(tokens, dtype=torch.long)
    return torch.stack([values // BASE**place % BASE for place in reversed(range(DIGITS))], 1)


def tokens_of(rows: Tensor) -> Tensor:
    """The tokens whose digits begin the rows. Nothing is copied to the device, which a CUDA graph could not record."""
    found = rows[:, 0].long()
    for place in range(1, DIGITS):
        found = found * BASE + rows[:, place].long()
    return found
