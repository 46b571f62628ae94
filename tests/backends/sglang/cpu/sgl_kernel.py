"""SGLang's kernels for CPUs, which are in no wheel, in plain torch: those that a Llama model with draft trees needs."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__path__: list[str] = []  # a package, of which `speculative` is this module too
sys.modules["sgl_kernel.speculative"] = sys.modules[__name__]


def __getattr__(name: str) -> Any:
    """What is imported and never called."""
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_, **__: sys.exit(f"sgl_kernel.{name} is called")


def _parts(rows: Tensor, start: Tensor, end: Tensor) -> Iterator[tuple[int, slice, slice]]:
    """Of each request its row, its places in that row, and those in a list of all."""
    taken = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        yield row, slice(first, last), slice(taken, taken := taken + last - first)


def assign_req_to_token_pool_cpu(
    rows: Tensor, table: Tensor, start: Tensor, end: Tensor, slots: Tensor, _: int
) -> None:
    for row, places, part in _parts(rows, start, end):
        table[row, places] = slots[part]


def assign_extend_cache_locs_cpu(
    rows: Tensor, table: Tensor, start: Tensor, end: Tensor, slots: Tensor, _: int
) -> None:
    for row, places, part in _parts(rows, start, end):
        slots[part] = table[row, places]


def fill_accept_out_cache_loc_cpu(accepted: Tensor, slots: Tensor, found: Tensor) -> None:
    chosen = slots[accepted[accepted >= 0].long()]
    found[: len(chosen)] = chosen


def copy_all_layer_kv_cache_cpu(pointers: Tensor, strides: Tensor, to: Tensor, source: Tensor) -> None:
    count = int(max(to.max(), source.max())) + 1
    for pointer, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        slots = np.frombuffer((ctypes.c_uint8 * (count * stride)).from_address(pointer), np.uint8).reshape(count, -1)
        slots[to.numpy()] = slots[source.numpy()]


def reconstruct_indices_from_tree_mask(
    mask: Tensor,
    lengths: Tensor,
    positions: Tensor,
    index: Tensor,
    child: Tensor,
    sibling: Tensor,
    rows: int,
    nodes: int,
) -> None:
    above = mask.view(rows, nodes, nodes).bool().tril(-1)
    parents = torch.where(above, torch.arange(nodes), -1).amax(-1).tolist()
    positions.view(rows, nodes).copy_(above.sum(-1) + lengths.view(-1, 1))
    index.copy_(torch.arange(rows * nodes).view(rows, nodes))
    for row in range(rows):
        first: dict[int, int] = {}
        for node in reversed(range(nodes)):
            child[row, node], sibling[row, node] = first.get(node, -1), first.get(parents[row][node], -1)
            first[parents[row][node]] = node


def verify_tree_greedy_cpu(
    *, predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, retrive_index: Tensor,
    retrive_next_token: Tensor, retrive_next_sibling: Tensor, target_predict: Tensor,
) -> None:  # fmt: skip
    for row, drafted in enumerate(candidates.tolist()):
        path, node = [0], 0
        while node >= 0:
            predicts[retrive_index[row, path[-1]]] = wanted = int(target_predict[row, path[-1]])
            node = int(retrive_next_token[row, path[-1]])
            while node >= 0 and drafted[node] != wanted:
                node = int(retrive_next_sibling[row, node])
            path += [node] if node >= 0 else []
        accept_index[row, : len(path)] = retrive_index[row, path]
        accept_token_num[row] = len(path) - 1


def _attend(q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, scale: float, mask: Any = None) -> Tensor:
    """Of one request: queries of shape (new, heads, size), slots of its text, and a mask of shape (new, whole)."""
    k, v = keys[slots].transpose(0, 1), values[slots].transpose(0, 1)
    return scaled_dot_product_attention(q.transpose(0, 1), k, v, mask, scale=scale, enable_gqa=True).transpose(0, 1)


def extend_attention_cpu(
    q: Tensor, k: Any, v: Any, out: Tensor, keys: Tensor, values: Tensor, _ks: float, _vs: float, table: Tensor,
    rows: Tensor, lengths: Tensor, news: Tensor, starts: Tensor, longest: int, scale: float, cap: float, cross: bool,
    window: int, encoder: Any, sinks: Any, trees: Tensor | None, causal: bool,
) -> None:  # fmt: skip
    for number, (row, _, part) in enumerate(_parts(rows, starts, starts + news)):
        length, new = int(lengths[number]), int(news[number])
        mask = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        if trees is not None:
            mask[:, length - new :] = trees.view(-1, new, new)[number]
        out[part] = _attend(q[part], keys, values, table[row, :length], scale, mask)


def decode_attention_cpu(
    q: Tensor, keys: Tensor, values: Tensor, _ks: float, _vs: float, out: Tensor, k: Tensor, v: Tensor, slots: Tensor,
    logits: Tensor, table: Tensor, rows: Tensor, lengths: Tensor, scale: float, *_: Any,
) -> None:  # fmt: skip
    keys[slots], values[slots] = k.view(len(slots), *keys.shape[1:]), v.view(len(slots), *values.shape[1:])
    for number, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        part = slice(number, number + 1)
        out[part] = _attend(q[part], keys, values, table[row, :length], scale)


for _kernel in (extend_attention_cpu, decode_attention_cpu):
    setattr(torch.ops.sgl_kernel, _kernel.__name__, _kernel)


def _attention(runner: Any) -> Any:
    """SGLang's backend for CPUs with AMX, which alone verifies trees, in the place of the one for all CPUs."""
    from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend  # pyright: ignore

    return IntelAMXAttnBackend(runner)


_native = ModuleType("sglang.srt.layers.attention.torch_native_backend")
sys.modules[_native.__name__], _native.TorchNativeAttnBackend = _native, _attention  # type: ignore[attr-defined]
