"""Norms as one kernel compute what the models' own code does: on a CUDA device and by Triton's interpreter."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from agentspec.backends.torch.model import norms
from agentspec.backends.torch.model.norms import FusedNorm, computes_alike, fuse_norms, unfuse_norms
from tests.triton_kernels import INTERPRETED, WITH_TRITON, compile_kernel, not_interpreted, run_interpreted

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]  # the interpreter cuts it off
with_device = pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device")
triton = [*WITH_TRITON, pytest.mark.gpu, with_device]


def norm_of(kind: Any, width: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Any:
    torch.manual_seed(width)
    norm = kind(width, eps=1e-5).to(device, dtype)
    norm.weight.data.add_(torch.randn(width, device=device).to(dtype) * 0.1)
    return norm


def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take norms on a CPU for those on a GPU."""
    monkeypatch.setattr(norms, "_is_norm", lambda module: isinstance(module, (LlamaRMSNorm, Gemma3RMSNorm)))


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.layers = norm, nn.ModuleList([nn.Linear(4, 4)])


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize("width", [8, 20, 96])
@pytest.mark.parametrize("dtype", DTYPES)
class TestKernel:
    pytestmark = triton

    @torch.inference_mode()
    def test_computes_what_the_models_own_code_does(
        self, kind: Any, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from agentspec.backends.torch.model import norm_triton

        monkeypatch.setattr(norms, "normalize", norm_triton.normalize)  # by the interpreter it is on a CPU
        check(FusedNorm(norm_of(kind, width, dtype, DEVICE)), dtype, DEVICE)


@torch.inference_mode()
def check(fused: FusedNorm, dtype: torch.dtype, device: torch.device) -> None:
    width = len(fused.weight)
    assert computes_alike(fused)
    for x in (torch.randn(1, 3, width), torch.randn(1, 2, 3, width), torch.randn(1, 3, 2, width).transpose(1, 2)):
        given = x.to(device, dtype)
        assert fused(given).shape == given.shape
        torch.testing.assert_close(fused(given), fused.original(given), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_torch_computes_what_the_models_own_code_does(kind: Any, dtype: torch.dtype) -> None:
    check(FusedNorm(norm_of(kind, 96, dtype)), dtype, torch.device("cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.gpu
def test_a_wide_norm_on_a_gpu_rounds_as_the_models_own_code_does() -> None:
    block = Block(norm_of(LlamaRMSNorm, 4096, torch.bfloat16, "cuda"))
    assert fuse_norms(block) == 1 and isinstance(block.norm, FusedNorm)


@not_interpreted
@pytest.mark.slow
def test_in_a_process_with_the_interpreter() -> None:
    if pytest.importorskip("triton"):
        run_interpreted(__file__, passed=12)


@not_interpreted
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_the_kernel_compiles_for_a_gpu() -> None:
    pytest.importorskip("triton")
    from agentspec.backends.torch.model import norm_triton

    pointers = dict.fromkeys(("x", "weight", "out"), "*bf16") | {"eps": "fp32"}
    compile_kernel(norm_triton._normalize, pointers, {"WIDTH": 4096, "WIDTH_2": 4096})


def test_a_model_on_a_cpu_keeps_its_norms() -> None:
    block = Block(norm_of(LlamaRMSNorm, 8))
    assert fuse_norms(block) == 0 and type(block.norm) is LlamaRMSNorm


def test_norms_that_compute_alike_are_replaced_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    anywhere(monkeypatch)
    llama, gemma = norm_of(LlamaRMSNorm, 8), norm_of(Gemma3RMSNorm, 8)
    block = Block(nn.ModuleList([llama, gemma]))
    assert fuse_norms(block) == 1  # Gemma's adds one to the weight
    assert isinstance(block.norm[0], FusedNorm) and block.norm[1] is gemma  # type: ignore[index]
    unfuse_norms(block)
    assert block.norm[0] is llama  # type: ignore[index]


@pytest.mark.parametrize("wrong", [1e-6, 1e-3])
def test_another_epsilon_is_noticed(wrong: float) -> None:
    fused = FusedNorm(norm_of(LlamaRMSNorm, 8))
    fused.eps = wrong
    assert not computes_alike(fused)


def test_a_machine_that_cannot_compile_keeps_the_models_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Any, x: torch.Tensor) -> torch.Tensor:
        raise ImportError("no compiler")

    anywhere(monkeypatch)
    monkeypatch.setattr(FusedNorm, "forward", fail)
    block = Block(norm_of(LlamaRMSNorm, 8))
    with caplog.at_level(logging.WARNING):
        assert fuse_norms(block) == 0
    assert type(block.norm) is LlamaRMSNorm and "norms are computed by the model's own code" in caplog.text


@torch.inference_mode()
def test_rows_of_another_type_go_to_the_models_own_code() -> None:
    norm = norm_of(LlamaRMSNorm, 8, torch.bfloat16)
    x = torch.randn(3, 8)
    assert torch.equal(FusedNorm(norm)(x), norm(x))
