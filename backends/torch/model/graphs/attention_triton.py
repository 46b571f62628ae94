"""`attend` of `attention.py` as Triton kernels: a sequence's committed slots are split among programs, whose results
are combined (flash-decoding). The query heads of a key head are rows of one block.
"""
# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# pyright: reportMissingImports=false, reportIndexIssue=false
# (Triton has no types for the arguments of a kernel.)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.backends.torch.model.graphs.step_table import BEGIN, COUNT, PAST, POSITIONS, SEES, SEQUENCE

_POSITIONS = tl.constexpr(POSITIONS)
_SEQUENCE = tl.constexpr(SEQUENCE)
_SEES = tl.constexpr(SEES)
_BEGIN = tl.constexpr(BEGIN)
_COUNT = tl.constexpr(COUNT)
_PAST = tl.constexpr(PAST)

_ROWS = 64  # rows of a block: tokens times query heads of a key head
_SLOTS = 32  # slots that a program reads at a time
_PROGRAMS = 264  # that keep a GPU busy: two for each multiprocessor of an H100
_MOST_SPLITS = 32


@triton.jit
def _add(q, k, v, visible, scale, best, total, result) -> Any:
    """Online softmax: take in the scores of `q` [rows, d] with `k` [d, slots], where `visible`, and `v` [slots, d]."""
    scores = tl.where(visible, tl.dot(q, k, input_precision="ieee") * scale, float("-inf"))
    most = tl.maximum(best, tl.max(scores, 1))
    base = tl.where(most == float("-inf"), 0.0, most)  # nothing seen so far
    weights, shrink = tl.exp(scores - base[:, None]), tl.exp(best - base)
    result = result * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return most, total * shrink + tl.sum(weights, 1), result


@triton.jit
def _see_committed(q, keys, values, first, past, own, position, window, scale, wide, best, total, result,
                   WIDTH: tl.constexpr, SLOTS: tl.constexpr) -> Any:  # fmt: skip
    """Take in this program's part of a sequence's slots from `first` to `past`."""
    split, splits, column, slot = tl.program_id(2), tl.num_programs(2), tl.arange(0, wide.shape[0]), tl.arange(0, SLOTS)
    share = tl.cdiv(tl.cdiv(past - first, splits), SLOTS) * SLOTS
    at = first + split * share
    end = tl.minimum(at + share, past)
    while at < end:
        place = at + slot
        there = place < end
        k = tl.load(keys + place[None, :] * WIDTH + column[:, None], mask=there[None, :] & wide[:, None], other=0.0)
        v = tl.load(values + place[:, None] * WIDTH + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
        near = (window == 0) | (place[None, :] > position[:, None] - window)
        best, total, result = _add(q, k, v, own[:, None] & there[None, :] & near, scale, best, total, result)
        at += SLOTS
    return best, total, result


@triton.jit
def _see_new(q, key, value, key_token, value_token, positions, begin, count, own, position, low, high, window, scale,
             wide, best, total, result, SLOTS: tl.constexpr) -> Any:  # fmt: skip
    """Take in those of a sequence's new tokens, from `begin` on, whose bits are set in `low` and `high`."""
    column, slot = tl.arange(0, wide.shape[0]), tl.arange(0, SLOTS)
    new = tl.zeros((), tl.int64)
    while new < count:
        place = new + slot
        there = place < count
        fresh = begin + place
        k = tl.load(key + fresh[None, :] * key_token + column[:, None], mask=there[None, :] & wide[:, None], other=0.0)
        v = tl.load(
            value + fresh[:, None] * value_token + column[None, :], mask=there[:, None] & wide[None, :], other=0.0
        )
        depth = tl.load(positions + fresh, mask=there, other=0)
        flags = tl.where(place[None, :] < 64, low[:, None], high[:, None])
        seen = ((flags >> (place[None, :] % 64)) & 1) != 0
        near = (window == 0) | (depth[None, :] > position[:, None] - window)
        visible = own[:, None] & there[None, :] & seen & near
        best, total, result = _add(q, k, v, visible, scale, best, total, result)
        new += SLOTS
    return best, total, result


@triton.jit
def _copy(source, source_token, slots, token, place, mask, column, WIDTH: tl.constexpr) -> None:
    """Write the rows of tokens to their places among a sequence's slots."""
    rows = tl.load(source + (token * source_token)[:, None] + column[None, :], mask=mask)
    tl.store(slots + (place * WIDTH)[:, None] + column[None, :], rows, mask=mask)


@triton.jit(do_not_specialize=["size", "layer", "window"])  # else it is compiled again for some sizes and layers
def _attend(
    query, key, value, table, bests, totals, results,
    query_head, query_token, key_head, key_token, value_head, value_token, size, heads, layer, window, scale,
    GROUPS: tl.constexpr, GROUPS_2: tl.constexpr, WIDTH: tl.constexpr, WIDTH_2: tl.constexpr,
    ROWS: tl.constexpr, SLOTS: tl.constexpr,
) -> None:  # fmt: skip
    """One block of tokens, one key head, one of several parts of the committed slots; the last part has the new tokens
    too, and writes their slots.
    """
    kv_head, split, splits = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH_2)
    token, group = tl.program_id(0) * (ROWS // GROUPS_2) + row // GROUPS_2, row % GROUPS_2
    head, wide = kv_head * GROUPS + group, column < WIDTH
    real = (token < size) & (group < GROUPS)
    both = real[:, None] & wide[None, :]
    key += kv_head * key_head
    value += kv_head * value_head
    q = tl.load(query + (head * query_head + token * query_token)[:, None] + column[None, :], mask=both, other=0.0)
    position = tl.load(table + _POSITIONS * size + token, mask=real, other=0)
    sequence = tl.load(table + _SEQUENCE * size + token, mask=real, other=-1)
    low = tl.load(table + _SEES * size + token, mask=real, other=0)
    high = tl.load(table + (_SEES + 1) * size + token, mask=real, other=0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, WIDTH_2], tl.float32)
    number = tl.min(tl.where(sequence < 0, size, sequence), 0)
    last = tl.max(sequence, 0)
    while number <= last:
        begin = tl.load(table + _BEGIN * size + number)
        past = tl.load(table + _PAST * size + number)
        to_head = kv_head * tl.load(table + (layer + 2) * size + number)
        keys = tl.load(table + layer * size + number).to(tl.pointer_type(key.dtype.element_ty)) + to_head
        values = tl.load(table + (layer + 1) * size + number).to(tl.pointer_type(value.dtype.element_ty)) + to_head
        own = sequence == number
        first = tl.where(window > 0, tl.maximum(past - window + 1, 0), 0)
        best, total, result = _see_committed(
            q, keys, values, first, past, own, position, window, scale, wide, best, total, result, WIDTH, SLOTS
        )
        if split == splits - 1:
            count = tl.load(table + _COUNT * size + number)
            best, total, result = _see_new(
                q, key, value, key_token, value_token, table + _POSITIONS * size, begin, count, own, position, low,
                high, window, scale, wide, best, total, result, SLOTS,
            )  # fmt: skip
            mine = both & (own & (group == 0))[:, None]
            _copy(key, key_token, keys, token, past + token - begin, mine, column, WIDTH)
            _copy(value, value_token, values, token, past + token - begin, mine, column, WIDTH)
        number += 1
    place = (split * size + token) * heads + head
    tl.store(bests + place, best, mask=real)
    tl.store(totals + place, total, mask=real)
    tl.store(results + place[:, None] * WIDTH + column[None, :], result, mask=both)


@triton.jit(do_not_specialize=["size"])
def _combine(
    bests, totals, results, out, size, heads, SPLITS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_2: tl.constexpr
) -> None:
    """One token and head: weigh the parts' results by what they saw."""
    token, head, column = tl.program_id(0), tl.program_id(1), tl.arange(0, WIDTH_2)
    place = (tl.arange(0, SPLITS) * size + token) * heads + head
    best = tl.load(bests + place)
    most = tl.max(best, 0)
    weight = tl.exp(best - tl.where(most == float("-inf"), 0.0, most))
    total = tl.sum(weight * tl.load(totals + place), 0)
    wide = column < WIDTH
    parts = tl.load(results + place[:, None] * WIDTH + column[None, :], mask=wide[None, :], other=0.0)
    result = tl.sum(weight[:, None] * parts, 0) / tl.where(total > 0, total, 1.0)  # padding sees nothing
    tl.store(out + (token * heads + head) * WIDTH + column, result.to(out.dtype.element_ty), mask=wide)


def attend(query: Tensor, key: Tensor, value: Tensor, table: Tensor, layer: int, window: int, scale: float) -> Tensor:
    _, heads, size, width = query.shape
    groups = heads // key.shape[1]
    groups_2 = triton.next_power_of_2(groups)
    blocks = triton.cdiv(size, _ROWS // groups_2)
    splits = max(1, min(_MOST_SPLITS, triton.next_power_of_2(_PROGRAMS // (blocks * key.shape[1]))))
    bests, totals = query.new_empty((2, splits, size, heads), dtype=torch.float32)
    results = query.new_empty((splits, size, heads, width), dtype=torch.float32)
    out = query.new_empty((1, size, heads, width))
    strides = (part.stride(axis) for part in (query, key, value) for axis in (1, 2))
    wide = {"WIDTH": width, "WIDTH_2": max(16, triton.next_power_of_2(width))}
    _attend[blocks, key.shape[1], splits](
        query, key, value, table, bests, totals, results, *strides, size, heads, layer, window, scale,
        GROUPS=groups, GROUPS_2=groups_2, **wide, ROWS=_ROWS, SLOTS=_SLOTS,
    )  # fmt: skip
    _combine[size, heads](bests, totals, results, out, size, heads, SPLITS=splits, **wide)
    return out
