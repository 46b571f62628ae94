"""Devices and number formats: what `auto` means, and what is refused."""

from __future__ import annotations

import pytest
import torch

from agentspec.backends.torch.loader import choose_device, choose_dtype
from agentspec.backends.torch.model.device import is_device_error, is_out_of_memory
from agentspec.errors import ConfigurationError

CPU = torch.device("cpu")


def test_auto_means_float32_on_a_cpu() -> None:
    assert choose_dtype("auto", choose_device("cpu")) == torch.float32
    assert choose_dtype("bfloat16", CPU) == torch.bfloat16
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("native", "want"), [(True, torch.bfloat16), (False, torch.float16)])
def test_auto_takes_what_a_device_computes_natively(
    monkeypatch: pytest.MonkeyPatch, native: bool, want: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    assert choose_dtype("auto", torch.device("cuda")) == want
    assert choose_dtype("auto", torch.device("mps")) == torch.bfloat16


@pytest.mark.parametrize("name", ["no-such", "cuda:99", "meta"])
def test_devices_that_cannot_be_used_are_configuration_errors(name: str) -> None:
    with pytest.raises(ConfigurationError, match=name) as caught:
        choose_device(name)
    assert caught.value.param == "device"


@pytest.mark.parametrize(("name", "advice"), [("int8", "must be auto or one of"), ("float16", "bfloat16 to halve")])
def test_formats_that_cannot_be_used_are_configuration_errors(name: str, advice: str) -> None:
    with pytest.raises(ConfigurationError, match=advice) as caught:
        choose_dtype(name, CPU)
    assert caught.value.param == "dtype"


@pytest.mark.parametrize(
    ("error", "memory", "device"),
    [
        (MemoryError(), True, False),
        (torch.OutOfMemoryError("CUDA out of memory"), True, False),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: not enough memory"), True, False),
        (RuntimeError("CUDA error: out of memory"), True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), True, False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False, True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"), False, True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), False, True),
        (torch.AcceleratorError("device-side assert triggered"), False, True),
        (RuntimeError("shapes cannot be multiplied"), False, False),
        (ValueError("CUDA error"), False, False),
    ],
)
def test_errors_of_memory_and_of_the_device_are_told_apart(error: Exception, memory: bool, device: bool) -> None:
    assert (is_out_of_memory(error), is_device_error(error)) == (memory, device)
