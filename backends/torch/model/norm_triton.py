"""Root mean square normalization as one Triton kernel, with the roundings of transformers' own code."""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# pyright: reportMissingImports=false, reportIndexIssue=false
# (Triton has no types for the arguments of a kernel.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDTHS_OF_WARPS = ((2048, 8), (512, 4), (0, 1))  # from which width on a row is given so many warps


@triton.jit
def _normalize(x, weight, out, eps, WIDTH: tl.constexpr, WIDTH_2: tl.constexpr) -> None:
    """Normalize a row in float32, round it to the row's type, and multiply it with `weight`, which has that type."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH_2)
    inside = column < WIDTH
    given = tl.load(x + row * WIDTH + column, mask=inside, other=0.0)
    wide = given.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    rounded = (wide * scale).to(given.dtype).to(tl.float32)
    scaled = rounded * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, scaled.to(given.dtype), mask=inside)


def normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, width = x.contiguous(), len(weight)
    out = torch.empty_like(rows)
    warps = next(warps for least, warps in _WIDTHS_OF_WARPS if width >= least)
    _normalize[(rows.numel() // width,)](
        rows, weight, out, eps, width, triton.next_power_of_2(width), num_warps=warps
    )  # fmt: skip
    return out
