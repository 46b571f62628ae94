"""Tells rounding from mistakes: how far may two forwards differ that compute the same logits in another order?

A bound in logits would depend on the model: in bfloat16 the logits of a sound model may differ by more than those of a
small wrong one. Differences are therefore measured relative to the logits' own spread, and compared with a noise floor:
the difference between forwards of the same model that must be equal but for the order of their sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

SAFETY = 6.0  # times the measured noise that two forwards may differ: it is a small sample (4.8 were seen with AVX2)
MOST = 6.0  # roots of the type's resolution: half a spread in bfloat16, where a mistake moves logits by a whole one


def relative_difference(computed: Tensor, expected: Tensor) -> float:
    """The root mean square of `computed - expected` [rows, vocab] over the spread of the expected logits in a row."""
    spread = (expected - expected.mean(-1, keepdim=True)).square().mean().sqrt()
    return float((computed - expected).square().mean().sqrt() / spread)


def largest_relative_difference(computed: Tensor, expected: Tensor) -> float:
    """The largest `relative_difference` of a row."""
    rows = zip(computed, expected, strict=True)
    return max(relative_difference(row[None], other[None]) for row, other in rows)


def allowed_difference(noise: float, dtype: torch.dtype) -> float:
    """The largest relative difference that rounding explains, given the `noise` that was measured. It leaves at least
    half of the type's digits to rounding, since few measurements may find less noise than there is.
    """
    return float(min(max(SAFETY * noise, torch.finfo(dtype).eps ** 0.5), largest_noise(dtype)))


def largest_noise(dtype: torch.dtype) -> float:
    """The largest relative difference that rounding can make in a sound model; 2e-3 in float32."""
    return float(MOST * torch.finfo(dtype).eps ** 0.5)
