"""Linear layers that take the place of a model's own: packed for its CPU, or with float32 logits."""

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


def can_pack() -> bool:
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


class Float32Head(nn.Module):
    """The logits of `linear` in float32, because bfloat16 logits have too many ties to sample or compare.

    A product of two numbers of 16 bits is exact in float32. Where the device adds such products in float32, the weight
    stays as it is, and a forward reads half as many bytes as of a weight in float32, which other devices get.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.weight = weight if adds_in_float32(weight) else weight.float()
        self.bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype and x.dtype != torch.float32:
            rows = torch.mm(x.flatten(0, -2), self.weight.T, out_dtype=torch.float32)
            logits = rows.view(*x.shape[:-1], -1)
            return logits if self.bias is None else logits + self.bias
        return nn.functional.linear(x.float(), self.weight.float(), self.bias)


def adds_in_float32(weight: Tensor) -> bool:
    """Whether its device multiplies matrices of this type into float32: CUDA does, from PyTorch 2.8 on."""
    if weight.device.type != "cuda" or weight.dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        torch.mm(weight[:8], weight[:8].T, out_dtype=torch.float32)
    except (TypeError, NotImplementedError):
        return False
    return True
