"""The kernels of recorded attention compute what plain torch computes, on a CUDA device and by Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from agentspec.backends.torch.model.batch import BatchItem
from agentspec.backends.torch.model.graphs.attention import attend_plainly
from agentspec.backends.torch.model.graphs.step_table import LAYERS, StepTable
from agentspec.backends.torch.model.kv_cache import SequenceCache
from tests.triton_kernels import INTERPRETED, WITH_TRITON, compile_kernel, not_interpreted, run_interpreted

pytestmark = WITH_TRITON
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
PASTS, WINDOWS = (0, 1, 63, 64, 65, 200), (0, 5, 70)


def items_of(rng: np.random.Generator, heads: int, width: int, dtype: torch.dtype) -> list[BatchItem]:
    """One to three sequences with committed slots, new tokens and a tree, 128 tokens at most."""
    items = []
    for _ in range(rng.integers(1, 4)):
        cache, past, nodes = SequenceCache(1), int(rng.choice(PASTS)), int(rng.choice([0, 3, 37]))
        if past:
            cache.update(*(torch.randn(1, heads, past, width, dtype=dtype) for _ in range(2)), 0)
            cache.commit(past, ())
        tokens, drafts = (rng.integers(0, 9, count).tolist() for count in (rng.integers(1, 5), nodes))
        items.append(
            BatchItem(cache, tokens, drafts, [int(rng.integers(-1, node)) if node else -1 for node in range(nodes)])
        )
    return items


def moved(items: list[BatchItem]) -> list[BatchItem]:
    """The same on `DEVICE`."""
    copies = []
    for item in items:
        assert isinstance(item.kv_cache, SequenceCache)
        cache = item.kv_cache.copy(item.kv_cache.length, 1)
        for store in (cache._keys, cache._values):
            store[:] = [None if slots is None else slots.to(DEVICE) for slots in store]
        copies.append(BatchItem(cache, item.tokens, item.draft_tokens, item.draft_parents))
    return copies


def attended(attend: Any, items: list[BatchItem], states: list[torch.Tensor], window: int) -> list[torch.Tensor]:
    """The result for the tokens of `items`, and the slots that they have then."""
    table = StepTable(1, states[0].shape[2], states[0].device)
    table.fill(items, [(states[1], states[2])])
    found = [attend(*states, table.memory, LAYERS, window, 0.3)[:, : sum(map(len, items))]]
    for item in items:
        assert isinstance(item.kv_cache, SequenceCache)
        end = item.kv_cache.length + len(item)
        found += [slots[:, :, :end] for slots in (*item.kv_cache._keys, *item.kv_cache._values) if slots is not None]
    return [part.cpu() for part in found]


@pytest.mark.gpu
@pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device")
@pytest.mark.parametrize("seed", range(8))
def test_the_kernels_compute_what_plain_torch_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentspec.backends.torch.model.graphs import attention_triton

    if INTERPRETED:  # every program takes a second
        monkeypatch.setattr(attention_triton, "_MOST_SPLITS", 2)
    rng, dtype = np.random.default_rng(seed), torch.bfloat16 if seed % 4 == 3 and not INTERPRETED else torch.float32
    torch.manual_seed(seed)
    heads, groups, width, window = (int(rng.choice(of)) for of in ([1, 2, 3], [1, 2, 3, 4], [8, 20, 64], WINDOWS))
    items = items_of(rng, heads, width, dtype)
    size = sum(map(len, items)) + int(rng.integers(0, 3))
    # As models have them: one view of rows by token, the others by head.
    query, value = (torch.randn(1, size, many, width, dtype=dtype).transpose(1, 2) for many in (heads * groups, heads))
    states = [query, torch.randn(1, heads, size, width, dtype=dtype), value]
    there = [part.to(DEVICE) for part in states]
    computed = attended(attention_triton.attend, moved(items), there, window)
    expected = attended(attend_plainly, items, states, window)
    assert (computed[0] - expected[0]).abs().max() < (2e-2 if dtype == torch.bfloat16 else 1e-5)
    for slots, wanted in zip(computed[1:], expected[1:], strict=True):
        assert torch.equal(slots, wanted)


@not_interpreted
def test_in_a_process_with_the_interpreter() -> None:
    run_interpreted(__file__, passed=8)


POINTERS = {"query": "*bf16", "key": "*bf16", "value": "*bf16", "table": "*i64", "out": "*bf16"}
FLOATS = {"bests": "*fp32", "totals": "*fp32", "results": "*fp32", "scale": "fp32"}
SIZES = {"GROUPS": 4, "GROUPS_2": 4, "WIDTH": 128, "WIDTH_2": 128, "SPLITS": 32}


@not_interpreted
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("name", ["_attend", "_combine"])
def test_the_kernels_compile_for_a_gpu(name: str) -> None:
    from agentspec.backends.torch.model.graphs import attention_triton

    kernel = getattr(attention_triton, name)
    integers = {argument: "i32" for argument in kernel.arg_names if not argument.isupper()}
    blocks = {"ROWS": attention_triton._ROWS, "SLOTS": attention_triton._SLOTS}
    compile_kernel(kernel, integers | POINTERS | FLOATS, SIZES | blocks)
