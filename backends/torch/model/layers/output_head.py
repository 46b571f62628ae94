"""An output head whose logits are float32, because bfloat16 logits have too many ties to sample or compare."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Float32Head(nn.Module):
    """The logits of `linear` in float32.

    A product of two numbers of 16 bits is exact in float32. Where the device adds such products in float32, the weight
    stays as it is, and a forward reads half as many bytes as of a weight in float32, which is kept elsewhere.
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
