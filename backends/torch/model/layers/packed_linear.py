"""Linear layers whose weights oneDNN packs once, at load, instead of at every call.

With few rows, a float32 matrix product on a CPU spends most of its time reordering the weights into its kernel's
layout. With weights packed at load, only the time to read memory is left.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

PACKED_ROWS = 16  # the number of rows that the layout is tuned for; it works with any number


class PackedLinear(nn.Module):
    """`nn.Linear` with a packed weight. Float32 on a CPU, inference only; `weight` has an opaque layout."""

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


def can_pack() -> bool:
    """Whether this build of torch has the packed kernels."""
    mkldnn = torch.ops.mkldnn
    has_ops = hasattr(mkldnn, "_reorder_linear_weight") and hasattr(mkldnn, "_linear_pointwise")
    return has_ops and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def pack_linears(model: nn.Module) -> int:
    """Replace every float32 CPU `nn.Linear` inside `model` by a packed one and return how many.

    The unpacked weight is freed unless something else (a tied embedding) still holds it.
    """
    if not can_pack():
        return 0
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.device.type == "cpu" and child.weight.dtype == torch.float32:
                setattr(parent, name, PackedLinear(child))
                count += 1
    return count


def unpack_linears(model: nn.Module) -> None:
    """Undo `pack_linears`, for a model that also uses its layers' weights directly."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedLinear):
                setattr(parent, name, child.unpacked())
