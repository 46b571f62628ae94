"""Linear layers that take the place of a model's own on a CPU."""

from __future__ import annotations

import math
from contextlib import suppress

import torch
from torch import Tensor, nn

PACKED_ROWS = 16  # the number of rows that the layout is tuned for; it works with any number
LARGEST = 14  # the binary exponent of the largest scaled weight: below float16's bound, 2 ** 16


def packed(linear: nn.Linear) -> HalfLinear | PackedLinear:
    """A faster layer for `linear`, which is in float32 on a CPU: with a weight of 16 bits if that loses nothing."""
    return HalfLinear.of(linear) or PackedLinear(linear)


class HalfLinear(nn.Module):
    """`nn.Linear` whose weight FBGEMM keeps in float16 and multiplies in float32. With few rows, reading the weight
    takes most of the time of a product, and here it is half as long.

    The weight is stored times `scale`, a power of two, so that small numbers of a model in bfloat16 are exact as well.
    """

    def __init__(self, linear: nn.Linear, scale: float) -> None:
        super().__init__()
        self.scale = scale
        bias = None if linear.bias is None else linear.bias.detach() * scale
        self.parts = torch.ops.quantized.linear_prepack_fp16(linear.weight.detach() * scale, bias)

    @classmethod
    def of(cls, linear: nn.Linear) -> HalfLinear | None:
        """None if float16 would change the weight, or if this processor or build of PyTorch has no such kernel."""
        largest = math.frexp(float(linear.weight.detach().abs().max()))[1]
        for scale in (1.0, 2.0 ** (LARGEST - largest)):
            scaled = linear.weight.detach() * scale
            if scaled.isfinite().all() and torch.equal(scaled.half().float(), scaled):  # FBGEMM bounds infinities
                with suppress(RuntimeError, AttributeError):
                    return cls(linear, scale)
        return None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.parts)
        return y if self.scale == 1.0 else y / self.scale

    def unpacked(self) -> nn.Linear:
        """The original `nn.Linear`, bit for bit."""
        weight, bias = torch.ops.quantized.linear_unpack_fp16(self.parts)
        return _linear(weight / self.scale, None if bias is None else bias / self.scale)


class PackedLinear(nn.Module):
    """`nn.Linear` whose weight oneDNN packs once, at load. Float32 on a CPU, inference only; `weight` has an opaque
    layout. With few rows, packing at every call would take most of the time of a product.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), PACKED_ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y

    def unpacked(self) -> nn.Linear:
        """The original `nn.Linear`, bit for bit."""
        return _linear(self.weight.to_dense(), self.bias)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    rows, columns = weight.shape
    with torch.device("meta"):
        linear = nn.Linear(columns, rows, bias=bias is not None)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
