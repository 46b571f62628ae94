"""Kernels of Triton and layers of ours compute what plain torch and the models' own code do, on a GPU and a CPU."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from agentspec.backends.torch.model.batch import BatchItem
from agentspec.backends.torch.model.graphs.step_table import LAYERS, StepTable
from agentspec.backends.torch.model.kv_cache import Rows, RowsPart, SequenceCache
from agentspec.backends.torch.model.layers import HalfLinear
from agentspec.backends.torch.model.replacements import Float32Head, FusedNorm, replace_layers, restore_layers
from tests.backends.torch.model.graphs.plain import attend_plainly
from tests.triton_kernels import INTERPRETED, WITH_TRITON, compile_kernel, not_interpreted, run_interpreted

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
PASTS, WINDOWS = (0, 1, 63, 64, 65, 200), (0, 5, 70)
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]  # the interpreter cuts it off
NORMS = pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
TRITON = WITH_TRITON[1]
without_device = pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device")


def with_triton(test: Any) -> Any:
    for mark in (*WITH_TRITON, pytest.mark.gpu, without_device):
        test = mark(test)
    return test


Items = list[tuple[SequenceCache, BatchItem]]


def items_of(rng: np.random.Generator, heads: int, width: int, dtype: torch.dtype) -> Items:
    """One to three sequences with committed slots, new tokens and a tree, 128 tokens at most."""
    items: Items = []
    for _ in range(rng.integers(1, 4)):
        cache, past, nodes = SequenceCache(1), int(rng.choice(PASTS)), int(rng.choice([0, 3, 37]))
        if past:
            cache.update(*(torch.randn(1, heads, past, width, dtype=dtype) for _ in range(2)), 0)
            cache.commit(past, ())
        tokens, drafts = (rng.integers(0, 9, count).tolist() for count in (rng.integers(1, 5), nodes))
        parents = [int(rng.integers(-1, node)) if node else -1 for node in range(nodes)]
        items.append((cache, BatchItem(cache, tokens, drafts, parents)))
    return items


def moved(items: Items) -> Items:
    """The same on `DEVICE`."""
    copies: Items = []
    for cache, item in items:
        rows = cache.rows(0, cache.length)
        there = Rows(
            *([slots.to(DEVICE) for slots in store if slots is not None] for store in (rows.keys, rows.values))
        )
        copy = SequenceCache.joined([RowsPart(there, cache.length)], 1)
        copies.append((copy, BatchItem(copy, item.tokens, item.draft_tokens, item.draft_parents)))
    return copies


def attended(attend: Any, items: Items, states: list[torch.Tensor], window: int) -> list[torch.Tensor]:
    """The result for the tokens of `items`, and the slots that they have then."""
    table = StepTable(1, states[0].shape[2], states[0].device)
    table.fill([item for _, item in items], [(states[1], states[2])])
    count = sum(len(item) for _, item in items)
    found = [attend(*states, table.memory, LAYERS, window, 0.3)[:, :count]]
    for cache, item in items:
        cache.commit(len(item), ())
        rows = cache.rows(0, cache.length)
        found += [slots for slots in (*rows.keys, *rows.values) if slots is not None]
    return [part.cpu() for part in found]


@with_triton
@pytest.mark.parametrize("seed", range(8))
def test_attention_is_that_of_plain_torch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentspec.backends.torch.model.graphs import attention_triton

    if INTERPRETED:  # every program takes a second
        monkeypatch.setattr(attention_triton, "_MOST_SPLITS", 2)
    rng, dtype = np.random.default_rng(seed), torch.bfloat16 if seed % 4 == 3 and not INTERPRETED else torch.float32
    torch.manual_seed(seed)
    heads, groups, width, window = (int(rng.choice(of)) for of in ([1, 2, 3], [1, 2, 3, 4], [8, 20, 64], WINDOWS))
    items = items_of(rng, heads, width, dtype)
    size = sum(len(item) for _, item in items) + int(rng.integers(0, 3))
    # As models have them: one view of rows by token, the others by head.
    query, value = (torch.randn(1, size, many, width, dtype=dtype).transpose(1, 2) for many in (heads * groups, heads))
    states = [query, torch.randn(1, heads, size, width, dtype=dtype), value]
    there = [part.to(DEVICE) for part in states]
    computed = attended(attention_triton.attend, moved(items), there, window)
    expected = attended(attend_plainly, items, states, window)
    assert (computed[0] - expected[0]).abs().max() < (2e-2 if dtype == torch.bfloat16 else 1e-5)
    for slots, wanted in zip(computed[1:], expected[1:], strict=True):
        assert torch.equal(slots, wanted)


def norm_of(kind: Any, width: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Any:
    torch.manual_seed(width)
    norm = kind(width, eps=1e-5).to(device, dtype)
    norm.weight.data.add_(torch.randn(width, device=device).to(dtype) * 0.1)
    return norm


def rows_of(width: int, norm: Any) -> list[torch.Tensor]:
    rows = (torch.randn(1, 3, width), torch.randn(1, 2, 3, width), torch.randn(1, 3, 2, width).transpose(1, 2))
    return [x.to(norm.weight.device, norm.weight.dtype) for x in rows]


@with_triton
@NORMS
@pytest.mark.parametrize("width", [8, 20, 96])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_norms_are_those_of_the_models_own_code(kind: Any, width: int, dtype: torch.dtype) -> None:
    from agentspec.backends.torch.model import norm_triton

    norm = norm_of(kind, width, dtype, DEVICE)
    for x in rows_of(width, norm):
        torch.testing.assert_close(norm_triton.normalize(x, norm.weight, 1e-5), norm(x), rtol=1e-2, atol=1e-6)


@not_interpreted
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, without_device])])
def test_norms_are_replaced_on_a_gpu_only_and_restored(device: str) -> None:
    block = nn.Sequential(norm_of(LlamaRMSNorm, 4096, torch.bfloat16, device))
    original = block[0]
    assert replace_layers(block) is isinstance(block[0], FusedNorm) is (device == "cuda")
    restore_layers(block)
    assert block[0] is original


@not_interpreted
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, without_device])])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_logits_are_float32_and_exact_and_a_gpu_reads_the_weight_as_it_is(dtype: torch.dtype, device: str) -> None:
    layer = nn.Linear(96, 160, dtype=dtype, device=device)
    head = Float32Head(layer)
    assert (head.weight.data_ptr() == layer.weight.data_ptr()) is (device == "cuda")
    for x in (*(torch.randn(1, rows, 96).to(dtype) for rows in (1, 2, 7, 32, 130)), torch.randn(1, 3, 96)):
        logits, exact = head(x.to(device)), layer.double()(x.to(device).double())
        layer.to(dtype)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)


@not_interpreted
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_a_cpu_keeps_weights_in_16_bits_where_that_loses_nothing(dtype: torch.dtype, bias: bool) -> None:
    layer = nn.Linear(96, 160, bias=bias)
    layer.weight.copy_((layer.weight * torch.logspace(0, -4, 160)[:, None]).to(dtype))
    weight, block = layer.weight.clone(), nn.ModuleList([layer])
    assert replace_layers(block)
    assert isinstance(block[0], HalfLinear) is (dtype != torch.float32)
    for x in (torch.randn(1, rows, 96) for rows in (1, 2, 7, 32, 130)):
        exact = nn.functional.linear(x.double(), weight.double(), layer.bias.double() if bias else None)
        torch.testing.assert_close(block[0](x).double(), exact, rtol=1e-5, atol=1e-6)
    restore_layers(block)
    restored: Any = block[0]
    assert torch.equal(restored.weight, weight) and (not bias or torch.equal(restored.bias, layer.bias))


@not_interpreted
@pytest.mark.parametrize("value", [torch.inf, torch.nan, 65504.0, 65520.0, 2.0**-24, 2.0**-120, 2.0**-149, 0.0])
@pytest.mark.parametrize("all_of_them", [False, True])
@torch.inference_mode()
def test_a_cpu_multiplies_by_the_weights_that_a_model_has(value: float, all_of_them: bool) -> None:
    layer = nn.Linear(32, 16, bias=False)
    layer.weight.copy_(torch.full((16, 32), value) if all_of_them else layer.weight.half())
    layer.weight[3, 5] = value
    x, block = torch.randn(2, 32), nn.ModuleList([layer])
    exact = layer(x)
    assert replace_layers(block)
    size = exact.nan_to_num(0, 0, 0).abs().max().item()
    torch.testing.assert_close(block[0](x), exact, rtol=1e-5, atol=1e-6 * size, equal_nan=True)


@not_interpreted
@pytest.mark.slow
@TRITON
def test_in_a_process_with_the_interpreter() -> None:
    run_interpreted(__file__, passed=20)


POINTERS = dict.fromkeys(("query", "key", "value", "out", "x", "weight"), "*bf16") | {"table": "*i64"}
FLOATS = {"bests": "*fp32", "totals": "*fp32", "results": "*fp32", "scale": "fp32", "eps": "fp32"}
SIZES = {"GROUPS": 4, "GROUPS_2": 4, "WIDTH": 128, "WIDTH_2": 128, "SPLITS": 32, "ROWS": 64, "SLOTS": 32}


@not_interpreted
@pytest.mark.slow
@TRITON
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    "name", ["graphs.attention_triton:_attend", "graphs.attention_triton:_combine", "norm_triton:_normalize"]
)
def test_the_kernels_compile_for_a_gpu(name: str) -> None:
    module, _, function = name.partition(":")
    kernel = getattr(importlib.import_module(f"agentspec.backends.torch.model.{module}"), function)
    integers = {argument: "i32" for argument in kernel.arg_names if not argument.isupper()}
    compile_kernel(kernel, integers | POINTERS | FLOATS, SIZES)
