"""Puts layers in the place of a model's own: packed on a CPU; norms as one kernel on CUDA; logits in float32."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from agentspec.backends.torch.model.device import is_device_error
from agentspec.backends.torch.model.layers import PackedLinear
from agentspec.telemetry.safe_errors import safe_message

logger = logging.getLogger(__name__)

NAME = "RMSNorm"  # how the classes' names end
SCALES = (1e-3, 1.0, 30.0)  # of the rows that are tried: the smallest show epsilon
MOST_UNLIKE = 0.01  # share of numbers that may be rounded to the neighbour: sums are added in another order
WIDE = 1e-5  # relative difference of float32 numbers, which that makes


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


@torch.library.custom_op("agentspec::rms_norm", mutates_args=())
def normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [..., width] over the root of its mean square, times `weight` [width], both of one type."""
    if x.device.type == "cuda":
        from agentspec.backends.torch.model import norm_triton

        return norm_triton.normalize(x, weight, eps)
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


@torch.inference_mode()
def fuse_norms(model: nn.Module) -> int:
    """Replace every norm inside `model` that the kernel computes alike, on a CUDA device, and return how many."""
    count = 0
    try:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if _is_norm(child) and computes_alike(fused := FusedNorm(child)):
                    setattr(parent, name, fused)
                    count += 1
    except Exception as error:  # without a compiler, say
        if is_device_error(error):
            raise
        logger.warning("norms are computed by the model's own code: %s", safe_message(error))
        unfuse_norms(model)
        return 0
    return count


def unfuse_norms(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, FusedNorm):
                setattr(parent, name, child.original)


def computes_alike(fused: FusedNorm) -> bool:
    """Whether the kernel's results for random rows are the original's, but for the rounding of a few."""
    weight = fused.weight
    generator = torch.Generator(weight.device).manual_seed(0)
    noise = torch.randn(len(SCALES), len(weight), generator=generator, device=weight.device)
    x = (noise * torch.tensor(SCALES, device=weight.device)[:, None]).to(weight.dtype)
    expected, found = fused.original(x), fused(x)
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return False
    wide = weight.dtype == torch.float32
    if not torch.allclose(expected, found, rtol=WIDE if wide else 2 * torch.finfo(weight.dtype).eps, atol=1e-7):
        return False
    return wide or float((expected != found).float().mean()) <= MOST_UNLIKE


def _is_norm(module: Any) -> bool:
    if not type(module).__name__.endswith(NAME) or _epsilon(module) is None:
        return False
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 1 and weight.device.type == "cuda"


def _epsilon(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))
