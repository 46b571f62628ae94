"""Puts layers in the place of a model's own: packed on a CPU; norms as one kernel on CUDA; logits in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from agentspec.backends.torch.model.layers import HalfLinear, PackedLinear, packed

NORM = "RMSNorm"  # how the classes' names end


def replace_layers(model: nn.Module) -> bool:
    """Put a packed layer in the place of each float32 `nn.Linear` on a CPU, and one kernel in that of each norm on a
    CUDA device. Returns whether there was any. A check has to follow, since some norms scale in another way.

    An unpacked weight is freed unless something else (a tied embedding) still holds it.
    """
    linear = torch.backends.mkldnn.is_available() and _replace(model, _packable, packed)  # type: ignore[no-untyped-call]
    return bool(linear or _replace(model, _is_norm, FusedNorm))


def restore_layers(model: nn.Module) -> None:
    """Undo `replace_layers`, for a model that also uses its layers' weights directly, or norms of another kind."""
    _replace(model, lambda layer: isinstance(layer, HalfLinear | PackedLinear), lambda layer: layer.unpacked())
    _replace(model, lambda layer: isinstance(layer, FusedNorm), lambda layer: layer.original)


def _replace(model: nn.Module, wanted: Callable[[Any], bool], make: Callable[[Any], nn.Module]) -> int:
    """Replace the layers inside `model` that are `wanted`; returns how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if wanted(child):
                setattr(parent, name, make(child))
                count += 1
    return count


def _packable(layer: Any) -> bool:
    return type(layer) is nn.Linear and layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32


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


class FusedNorm(nn.Module):
    """The norm `original`, as one kernel for rows of its weight's type: with few tokens, transformers' eight small
    kernels take as long as a tenth of all matrix products.
    """

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.original, self.weight, self.eps = original, original.weight, _epsilon(original)

    def forward(self, x: Tensor) -> Tensor:
        same = x.dtype == self.weight.dtype
        result: Tensor = normalize(x, self.weight, self.eps) if same else self.original(x)
        return result


@torch.library.custom_op("agentspec::rms_norm", mutates_args=(), device_types="cuda")
def normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [..., width] over the root of its mean square, times `weight` [width], both of one type."""
    from agentspec.backends.torch.model import norm_triton

    return norm_triton.normalize(x, weight, eps)


def _is_norm(module: Any) -> bool:
    if not type(module).__name__.endswith(NORM) or _epsilon(module) is None:
        return False
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 1 and weight.device.type == "cuda"


def _epsilon(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))
