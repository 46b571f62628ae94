"""The kernels against attention with repeated keys, one sequence at a time and several in one row."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from agentspec.backends.torch.model.batch import (
    Ragged,
    attention_mask,
    grouped_attention,
    packed_attention,
    tree_layout,
)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_equals_attention_with_repeated_keys(heads: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    length, past = 5, 7
    query = torch.randn(1, heads, length, 8)
    key, value = torch.randn(2, 1, kv_heads, past + length, 8)
    layout, groups = tree_layout(2, [-1, 0, -1]), heads // kv_heads
    mask = attention_mask(layout, past, window=None, groups=1, dtype=torch.float32)
    stacked = attention_mask(layout, past, window=None, groups=groups, dtype=torch.float32)
    out = grouped_attention(query, key, value, stacked, scaling=0.3)
    repeated = [tensor.repeat_interleave(groups, dim=1) for tensor in (key, value)]
    want = torch.softmax(query @ repeated[0].mT * 0.3 + mask, -1) @ repeated[1]
    assert out.shape == (1, length, heads, 8)
    assert (out - want.transpose(1, 2)).abs().max() < 1e-5


def test_a_single_row_needs_no_mask() -> None:
    query, key, value = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    out = grouped_attention(query, key, value, None, scaling=1.0)
    masked = grouped_attention(query, key, value, torch.zeros(1, 1, 2, 9), scaling=1.0)
    assert torch.allclose(out, masked, atol=1e-6)


@pytest.mark.parametrize("count", [1, 3])
def test_packed_sequences_attend_each_to_its_own_rows(count: int) -> None:
    lengths, sizes = [1, 3, 2][:count], [9, 4, 30][:count]
    query = torch.randn(1, 4, sum(lengths), 8)
    rows = [torch.randn(2, 1, 2, size, 8) for size in sizes]
    masks = [None, *(torch.randn(1, 1, 2 * length, size) for length, size in zip(lengths[1:], sizes[1:], strict=True))]
    ragged = Ragged([keys for keys, _ in rows], [values for _, values in rows], lengths, masks)
    out, weights = packed_attention(nn.Module(), query, ragged, ragged, None, scaling=0.3)
    alone = [
        grouped_attention(queries, pair[0], pair[1], mask, 0.3)
        for queries, pair, mask in zip(query.split(lengths, 2), rows, masks, strict=True)
    ]
    assert weights is None and torch.equal(out, torch.cat(alone, 1))


@pytest.mark.parametrize("variant", ["softcap", "s_aux", "position_bias"])
def test_other_attention_variants_are_refused(variant: str) -> None:
    rows = Ragged([torch.randn(1, 1, 1, 8)], [torch.randn(1, 1, 1, 8)], [1], [None])
    with pytest.raises(NotImplementedError):
        packed_attention(
            nn.Module(), torch.randn(1, 1, 1, 8), rows, rows, None, scaling=1.0, **{variant: torch.ones(1)}
        )
