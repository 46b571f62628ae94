"""The checks at load: sound models pass in every number format, wrong masks in none, and a fault is no verdict."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from agentspec.backends.settings import TorchSettings
from agentspec.backends.torch.loader import choose_device, choose_dtype, load, prepare
from agentspec.backends.torch.model.batch import ATTENTION_NAME
from agentspec.errors import ConfigurationError, EngineStoppedError, ModelUnavailableError
from tests.backends.torch.conftest import tiny

DTYPES = [torch.float32, torch.bfloat16]
# function, what to change, changed
MISTAKES = {
    "siblings see each other": ("tree_layout", "sees[row] = sees[above]", "pass"),
    "positions are columns": ("tree_layout", "depths[row] = depths[above] + 1", "depths[row] = row"),
    "positions one further": ("PackedCache.__init__", "past + layout.depths",
        "(past + 1) * (past > 0) + layout.depths"),
    "two tokens without a mask": ("_view", "len(layout) == 1", "len(layout) <= 9"),
    "logits of the row before": ("logit_rows", "np.arange(end - item.outputs, end)",
        "np.arange(end - item.outputs, end) - 1"),
}  # fmt: skip


def taken(module: Any, tokens: Any) -> bool:
    """Whether a model runs with the grouped attention; it may be refused, or run with an attention of its own."""
    try:
        return prepare(module, tokens, name="m", fingerprint="f").target.attention == ATTENTION_NAME
    except ModelUnavailableError:
        return False


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_grouped_attention_is_refused_in_every_format(
    byte_tokens: Any, mutate: Any, name: str, dtype: torch.dtype
) -> None:
    mutate(*MISTAKES[name])
    assert not taken(tiny("llama").to(dtype), byte_tokens)


def test_a_mistake_is_refused_in_every_family(family: Any, byte_tokens: Any, mutate: Any) -> None:
    mutate(*MISTAKES["positions are columns"])
    assert not taken(copy.deepcopy(family.reference).to(torch.bfloat16), byte_tokens)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_window_one_wider_is_seen_though_the_models_own_is_far_longer_than_the_check(
    byte_tokens: Any, mutate: Any, dtype: torch.dtype
) -> None:
    module = tiny("mistral").to(dtype)
    module.config.sliding_window = 4096
    mutate("attention_mask", "<= positions[:, None] - window", "< positions[:, None] - window")
    with pytest.raises(ModelUnavailableError, match="cannot be rewound"):
        prepare(module, byte_tokens, name="m", fingerprint="f")


@pytest.mark.parametrize("models", [3, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("split_sums")
def test_rounding_in_another_order_is_not_refused(byte_tokens: Any, models: int) -> None:
    for number in range(models):
        module = tiny("llama")
        for weight in module.parameters():
            weight.data *= 1 + number / 8
        assert taken(module.to(torch.bfloat16), byte_tokens)


MEMORY, DEVICE = ModelUnavailableError, EngineStoppedError


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (MemoryError(), MEMORY),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: not enough memory"), MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), MEMORY),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), DEVICE),
        (torch.AcceleratorError("device-side assert triggered"), DEVICE),
        (ValueError("CUDA error"), ValueError),
    ],
)
def test_a_fault_while_a_model_is_loaded_is_reported_as_one(
    saved_model: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception]
) -> None:
    with pytest.raises(raised, match={MEMORY: "memory of 'cpu'", DEVICE: "restarted"}.get(raised, "CUDA")):
        load_failing(saved_model, monkeypatch, error, 0)


def load_failing(folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, after: int) -> int:
    """Load a model whose forwards raise `error` after so many; returns how many it ran."""
    forward, calls = LlamaForCausalLM.forward, 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if error is not None and calls > after:
            raise error
        return forward(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(LlamaForCausalLM, "forward", failing)  # no device fails when it is asked to
        load(TorchSettings(model=str(folder), device="cpu"))
    return calls


def test_a_fault_is_no_verdict_about_the_model_whenever_it_comes(
    saved_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards = load_failing(saved_model, monkeypatch, None, 0)
    for after in range(0, forwards, max(1, forwards // 6)):
        with pytest.raises(EngineStoppedError):
            load_failing(saved_model, monkeypatch, RuntimeError("CUDA error: an illegal memory access"), after)


@pytest.mark.parametrize(("native", "want"), [(True, torch.bfloat16), (False, torch.float16)])
def test_auto_chooses_a_native_number_format(monkeypatch: pytest.MonkeyPatch, native: bool, want: torch.dtype) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)  # no such device is here
    assert choose_dtype("auto", torch.device("cuda")) == want
    assert choose_dtype("auto", torch.device("mps")) == torch.bfloat16
    assert choose_dtype("auto", choose_device("cpu")) == torch.float32


@pytest.mark.parametrize(
    ("settings", "param", "says"),
    [
        ({"device": "no-such"}, "device", "no-such"),
        ({"device": "cuda:99"}, "device", "cuda:99"),
        ({"device": "meta"}, "device", "meta"),
        ({"dtype": "int8"}, "dtype", "must be auto or one of"),
        ({"dtype": "float16", "device": "cpu"}, "dtype", "bfloat16 to halve"),
    ],
)
def test_devices_and_formats_that_cannot_be_used_are_configuration_errors(
    saved_model: Path, settings: dict[str, str], param: str, says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        load(TorchSettings(model=str(saved_model), **settings))
    assert caught.value.param == param
