"""The output head gives float32 logits, on a GPU without a float32 copy of its weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from agentspec.backends.torch.model import layers
from agentspec.backends.torch.model.layers import Float32Head, adds_in_float32

HALVES = [torch.bfloat16, torch.float16]
BIASES = pytest.mark.parametrize("bias", [False, True])


def linear(dtype: torch.dtype, *, bias: bool, device: str = "cpu") -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(96, 160, bias=bias, dtype=dtype, device=device)


def exact(layer: nn.Linear, x: Tensor) -> Tensor:
    bias = None if layer.bias is None else layer.bias.double()
    return nn.functional.linear(x.double(), layer.weight.double(), bias)


def check(layer: nn.Linear, x: Tensor) -> None:
    logits = Float32Head(layer)(x)
    assert logits.dtype == torch.float32 and logits.shape == (*x.shape[:-1], 160)
    torch.testing.assert_close(logits.double(), exact(layer, x), rtol=1e-5, atol=1e-5)


@BIASES
@pytest.mark.parametrize("dtype", HALVES)
@torch.inference_mode()
def test_logits_are_float32_and_exact(dtype: torch.dtype, bias: bool) -> None:
    layer = linear(dtype, bias=bias)
    check(layer, torch.randn(2, 5, 96).to(dtype))
    check(layer, torch.randn(1, 96))  # a model whose last norm computes in float32
    assert not adds_in_float32(layer.weight)


@BIASES
@torch.inference_mode()
def test_a_device_that_adds_in_float32_reads_the_weight_as_it_is(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def mm(left: Tensor, right: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        return left.to(out_dtype) @ right.to(out_dtype)

    monkeypatch.setattr(layers, "adds_in_float32", lambda weight: True)
    monkeypatch.setattr(torch, "mm", mm)
    layer = linear(torch.bfloat16, bias=bias)
    assert Float32Head(layer).weight.data_ptr() == layer.weight.data_ptr()
    check(layer, torch.randn(1, 5, 96).to(torch.bfloat16))
    check(layer, torch.randn(1, 5, 96))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@BIASES
@pytest.mark.parametrize("dtype", HALVES)
@torch.inference_mode()
def test_on_a_gpu(dtype: torch.dtype, bias: bool) -> None:
    layer = linear(dtype, bias=bias, device="cuda")
    assert adds_in_float32(layer.weight) and Float32Head(layer).weight.data_ptr() == layer.weight.data_ptr()
    for rows in (1, 2, 7, 32, 130):
        check(layer, torch.randn(1, rows, 96, device="cuda").to(dtype))
    check(layer, torch.randn(1, 3, 96, device="cuda"))
