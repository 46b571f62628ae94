"""Packed layers compute what plain ones do, and are the ones that run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from agentspec.backends.torch.model.layers import PackedLinear, can_pack, pack_linears, unpack_linears

pytestmark = pytest.mark.skipif(not can_pack(), reason="this build of torch has no packed kernels")


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, 33, 100])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_equals_the_plain_layer(rows: int, bias: bool) -> None:
    linear = nn.Linear(96, 130, bias=bias)
    x = torch.randn(1, rows, 96)
    assert (PackedLinear(linear)(x) - linear(x)).abs().max() < 1e-4


def test_every_float32_linear_is_replaced_and_no_other_module() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.Linear(4, 4, dtype=torch.bfloat16)
    )
    assert pack_linears(model) == 2
    assert [type(module) for module in (model[0], model[1][0], model[2])] == [PackedLinear, PackedLinear, nn.Linear]
    assert not list(model[0].parameters())  # the unpacked weight is gone


@pytest.mark.parametrize("bias", [False, True])
def test_unpacking_gives_the_same_weights(bias: bool) -> None:
    linear = nn.Linear(8, 6, bias=bias)
    model = nn.Sequential(linear, nn.ReLU())
    pack_linears(model)
    unpack_linears(model)
    assert type(model[0]) is nn.Linear and model[0] is not linear
    assert torch.equal(model[0].weight, linear.weight)
    assert not bias or torch.equal(model[0].bias, linear.bias)
