"""Linear layers that take the place of a model's own on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

PACKED_ROWS = 16  # the number of rows that the layout is tuned for; it works with any number


class PackedLinear(nn.Module):
    """`nn.Linear` whose weight oneDNN packs once, at load. Float32 on a CPU, inference only; `weight` has an opaque
    layout. With few rows, packing at every call would take most of the time of a product.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), PACKED_ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y

    def unpacked(self) -> nn.Linear:
        """The original `nn.Linear`, bit for bit."""
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        linear.weight = nn.Parameter(self.weight.to_dense(), requires_grad=False)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias, requires_grad=False)
        return linear
