"""The grouped kernel against attention with repeated keys."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from agentspec.backends.torch.attention import grouped_attention
from agentspec.backends.torch.tree_mask import attention_mask, tree_layout


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("stacked", [True, False])
def test_equals_attention_with_repeated_keys(heads: int, kv_heads: int, stacked: bool) -> None:
    torch.manual_seed(0)
    length, past = 5, 7
    query = torch.randn(1, heads, length, 8)
    key, value = torch.randn(2, 1, kv_heads, past + length, 8)
    layout, groups = tree_layout(2, [-1, 0, -1]), heads // kv_heads
    mask = attention_mask(layout, past, window=None, groups=1, dtype=torch.float32)
    given = attention_mask(layout, past, window=None, groups=groups, dtype=torch.float32) if stacked else mask
    out, weights = grouped_attention(nn.Module(), query, key, value, given, scaling=0.3)
    repeated = [tensor.repeat_interleave(groups, dim=1) for tensor in (key, value)]
    want = torch.softmax(query @ repeated[0].mT * 0.3 + mask, -1) @ repeated[1]
    assert weights is None and out.shape == (1, length, heads, 8)
    assert (out - want.transpose(1, 2)).abs().max() < 1e-5


def test_a_single_row_needs_no_mask() -> None:
    query, key, value = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    out, _ = grouped_attention(nn.Module(), query, key, value, None, scaling=1.0)
    masked, _ = grouped_attention(nn.Module(), query, key, value, torch.zeros(1, 1, 1, 9), scaling=1.0)
    assert torch.allclose(out, masked, atol=1e-6)


@pytest.mark.parametrize("variant", ["softcap", "s_aux", "position_bias"])
def test_other_attention_variants_are_refused(variant: str) -> None:
    tensors = torch.randn(3, 1, 1, 1, 8)
    with pytest.raises(NotImplementedError):
        grouped_attention(nn.Module(), *tensors, None, scaling=1.0, **{variant: torch.ones(1)})
