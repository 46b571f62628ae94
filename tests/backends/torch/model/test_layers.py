"""Layers that take the place of a model's own compute the same: packed for its CPU, or with float32 logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from agentspec.backends.torch.model.layers import (
    Float32Head,
    PackedLinear,
    adds_in_float32,
    can_pack,
    pack_linears,
    unpack_linears,
)

HALVES = [torch.bfloat16, torch.float16]
BIASES = pytest.mark.parametrize("bias", [False, True])
PACKS = pytest.mark.skipif(not can_pack(), reason="this build of torch has no packed kernels")


@PACKS
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, 33, 100])
@BIASES
@torch.inference_mode()
def test_a_packed_layer_equals_the_plain_one_and_is_unpacked_to_it(rows: int, bias: bool) -> None:
    linear = nn.Linear(96, 130, bias=bias)
    x, packed = torch.randn(1, rows, 96), PackedLinear(linear)
    assert (packed(x) - linear(x)).abs().max() < 1e-4
    assert torch.equal(packed.unpacked()(x), linear(x))


@PACKS
def test_every_float32_linear_is_replaced_and_no_other_module() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.Linear(4, 4, dtype=torch.bfloat16)
    )
    assert pack_linears(model) == 2
    assert [type(module) for module in (model[0], model[1][0], model[2])] == [PackedLinear, PackedLinear, nn.Linear]
    assert not list(model[0].parameters())  # the unpacked weight is gone
    unpack_linears(model)
    assert type(model[0]) is type(model[1][0]) is nn.Linear


def check_head(layer: nn.Linear, x: Tensor) -> None:
    logits = Float32Head(layer)(x)
    assert logits.dtype == torch.float32 and logits.shape == (*x.shape[:-1], 160)
    bias = None if layer.bias is None else layer.bias.double()
    exact = nn.functional.linear(x.double(), layer.weight.double(), bias)
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)


@BIASES
@pytest.mark.parametrize("dtype", HALVES)
@torch.inference_mode()
def test_logits_are_float32_and_exact(dtype: torch.dtype, bias: bool) -> None:
    layer = nn.Linear(96, 160, bias=bias, dtype=dtype)
    check_head(layer, torch.randn(2, 5, 96).to(dtype))
    check_head(layer, torch.randn(1, 96))  # a model whose last norm computes in float32
    assert not adds_in_float32(layer.weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@BIASES
@pytest.mark.parametrize("dtype", HALVES)
@torch.inference_mode()
def test_a_gpu_that_adds_in_float32_reads_the_weight_as_it_is(dtype: torch.dtype, bias: bool) -> None:
    layer = nn.Linear(96, 160, bias=bias, dtype=dtype, device="cuda")
    assert adds_in_float32(layer.weight) and Float32Head(layer).weight.data_ptr() == layer.weight.data_ptr()
    for rows in (1, 2, 7, 32, 130):
        check_head(layer, torch.randn(1, rows, 96, device="cuda").to(dtype))
    check_head(layer, torch.randn(1, 3, 96, device="cuda"))
