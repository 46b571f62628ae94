"""Attention over many key/value rows with few query rows: grouped heads share their keys instead of copying them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION_NAME = "agentspec_grouped"
UNSUPPORTED = ("softcap", "s_aux", "position_bias")


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of `query` [1, heads, L, d] over `key`, `value` [1, kv_heads, S, d]; returns [1, L, heads, d].

    The query heads that share a key head are stacked along the query axis, so that no key is ever repeated.
    `attention_mask` is additive, [1, 1, L, S] or already stacked [1, 1, groups * L, S]; None attends everywhere, which
    is right for a single query row only. Raises NotImplementedError for variants this kernel does not compute.
    """
    if any(kwargs.get(name) is not None for name in UNSUPPORTED):
        raise NotImplementedError(f"grouped attention knows none of {UNSUPPORTED}")
    batch, heads, length, width = query.shape
    groups = heads // key.shape[1]
    stacked = query.reshape(batch, key.shape[1], groups * length, width)
    if attention_mask is not None and attention_mask.shape[-2] != groups * length:
        attention_mask = attention_mask.repeat(1, 1, groups, 1)
    out = scaled_dot_product_attention(stacked, key, value, attn_mask=attention_mask, scale=scaling)
    out = out.reshape(batch, heads, length, value.shape[-1])
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, grouped_attention)
