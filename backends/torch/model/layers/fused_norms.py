"""Replaces the norms of a model on a GPU by one kernel each.

transformers computes a root mean square norm in eight small kernels, and a model has two norms in every layer: with few
tokens they take as long as a tenth of all matrix products.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from agentspec.backends.torch.model.device import is_device_error
from agentspec.telemetry.safe_errors import safe_message

logger = logging.getLogger(__name__)

NAME = "RMSNorm"  # how the classes' names end
SCALES = (1e-3, 1.0, 30.0)  # of the rows that are tried: the smallest show epsilon
MOST_UNLIKE = 0.01  # share of numbers that may be rounded to the neighbour: sums are added in another order


class FusedNorm(nn.Module):
    """The norm `original`, as one kernel for rows of its weight's type."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.original, self.weight, self.eps = original, original.weight, _epsilon(original)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            own: Tensor = self.original(x)
            return own
        from agentspec.backends.torch.model.layers.norm_triton import normalize

        return normalize(x, self.weight, self.eps)


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
    """Undo `fuse_norms`."""
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
    if not torch.allclose(expected, found, rtol=2 * torch.finfo(weight.dtype).eps, atol=1e-7):
        return False
    return weight.dtype == torch.float32 or float((expected != found).float().mean()) <= MOST_UNLIKE


def _is_norm(module: Any) -> bool:
    if not type(module).__name__.endswith(NAME) or _epsilon(module) is None:
        return False
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 1 and weight.device.type == "cuda"


def _epsilon(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))
