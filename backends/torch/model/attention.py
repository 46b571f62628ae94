"""Attention of few query rows over many KV slots: grouped heads share their keys instead of copying them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION_NAME = "agentspec_grouped"
UNSUPPORTED = ("softcap", "s_aux", "position_bias")


class Attended(Protocol):
    """The object that a layer's queries attend to; it takes the place of the layer's keys and values."""

    def attend(self, query: Tensor, scaling: float | None) -> Tensor:
        """The attention of `query` [1, heads, L, d]; returns [1, L, heads, d]."""
        ...


@dataclass(frozen=True, slots=True)
class Ragged:
    """One layer's keys and values [1, kv_heads, S_i, d] of several sequences, in the order of their queries.

    `lengths` are the sequences' numbers of query rows; `masks` are as `grouped_attention` takes them.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    lengths: Sequence[int]
    masks: Sequence[Tensor | None]

    def attend(self, query: Tensor, scaling: float | None) -> Tensor:
        """Attend with each sequence's queries over its own slots, without padding, as if each ran alone."""
        queries = query.split_with_sizes(self.lengths, 2)
        parts = [
            grouped_attention(*part, scaling) for part in zip(queries, self.keys, self.values, self.masks, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Attended,
    value: Attended,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of `query` [1, heads, L, d], computed by the cache passed as `key`; returns [1, L, heads, d].

    Raises NotImplementedError for attention variants that our caches do not compute.
    """
    if any(kwargs.get(name) is not None for name in UNSUPPORTED):
        raise NotImplementedError(f"grouped attention knows none of {UNSUPPORTED}")
    return key.attend(query, scaling).contiguous(), None


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None
) -> Tensor:
    """Attention of `query` [1, heads, L, d] over `key`, `value` [1, kv_heads, S, d]; returns [1, L, heads, d].

    The query heads that share a key head are stacked along the query axis, so that no key is ever repeated. `mask` is
    additive and stacked likewise, [1, 1, groups * L, S]; None attends everywhere, which suits a single query row only.
    """
    batch, heads, length, width = query.shape
    stacked = query.reshape(batch, key.shape[1], heads // key.shape[1] * length, width)
    out = scaled_dot_product_attention(stacked, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, length, value.shape[-1]).transpose(1, 2)


AttentionInterface.register(ATTENTION_NAME, packed_attention)
