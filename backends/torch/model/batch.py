"""Packs several sequences into one row: linear layers run once over all tokens, attention runs for each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache

from agentspec.backends.torch.model.device import to_device
from agentspec.backends.torch.model.kv_cache import SequenceCache

ATTENTION_NAME = "agentspec_grouped"
UNSUPPORTED = ("softcap", "s_aux", "position_bias")


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
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of `query` [1, heads, L, d], computed by the cache passed as `key`; returns [1, L, heads, d].

    Raises NotImplementedError for attention variants that our caches do not compute.
    """
    if any(kwargs.get(name) is not None for name in UNSUPPORTED):
        raise NotImplementedError(f"grouped attention supports none of {UNSUPPORTED}")
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


CPU = torch.device("cpu")
ALIGNED = 16  # columns; CUDA kernels first copy a mask whose rows do not begin at multiples of this


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """The L tokens of one forward: `depths[i]` is token i's position relative to the first, and `sees[i, j]` says
    whether token i attends to token j; each attends to itself.
    """

    depths: NDArray[np.int64]
    sees: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.depths)


def tree_layout(num_tokens: int, parents: Sequence[int]) -> TreeLayout:
    """The layout of `num_tokens` consecutive tokens and then tree nodes. A node's parent is another node's index, or
    -1 for the last of the tokens.
    """
    total = num_tokens + len(parents)
    depths = np.arange(total, dtype=np.int64)
    sees = np.tri(total, dtype=np.bool_)
    for node, parent in enumerate(parents):
        row, above = num_tokens + node, num_tokens + parent
        depths[row] = depths[above] + 1
        sees[row] = sees[above]
        sees[row, row] = True
    return TreeLayout(depths, sees)


def first_visible(past: int, window: int | None) -> int:
    """The first committed slot that a token after `past` committed slots can see."""
    return 0 if window is None else max(0, past - window + 1)


def attention_mask(
    layout: TreeLayout,
    past: int,
    *,
    window: int | None,
    groups: int,
    dtype: torch.dtype,
    first: int = 0,
    device: torch.device = CPU,
) -> Tensor:
    """The additive mask [1, 1, groups * L, past + L - first] of a layer that looks back `window` positions (None: all).

    Columns begin at committed slot `first`. A committed slot's column is given by its position, but a tree node's
    column is not. Distances are therefore taken between positions, never between columns.
    """
    known, size, lowest = past - first, len(layout), torch.finfo(dtype).min
    width = known + size
    room = torch.zeros(groups, size, -(-width // ALIGNED) * ALIGNED, dtype=dtype, device=device)
    mask = room[:, :, :width]
    mask[:, :, known:].masked_fill_(to_device(~layout.sees, device), lowest)
    if window is not None:
        positions = to_device(past + layout.depths, device)
        columns = torch.cat([torch.arange(first, past, device=device), positions])
        mask.masked_fill_(columns[None, :] <= positions[:, None] - window, lowest)
    return mask.view(1, 1, groups * size, width)


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One sequence's part of a forward: tokens that follow its committed slots, then a draft tree below the last token.

    `needs_logits` is False for all but the last chunk of a prompt.
    """

    kv_cache: SequenceCache
    tokens: Sequence[int]
    draft_tokens: Sequence[int] = ()
    draft_parents: Sequence[int] = ()
    needs_logits: bool = True

    def __len__(self) -> int:
        return len(self.tokens) + len(self.draft_tokens)

    @property
    def outputs(self) -> int:
        """The number of logits rows it gets: one after the last token and one after every draft node."""
        return 1 + len(self.draft_tokens) if self.needs_logits else 0


class PackedCache(Cache):
    """Presents the caches of several sequences as one cache for a single forward.

    `update` writes each sequence's slots and returns a `Ragged`, which only `packed_attention` understands.
    `windows` says for each layer how far it looks back (None: everything).
    """

    def __init__(
        self, items: Sequence[BatchItem], windows: Sequence[int | None], groups: int, dtype: torch.dtype, device: Any
    ) -> None:
        super().__init__(layers=[])
        self._caches = [item.kv_cache for item in items]
        self._lengths = [len(item) for item in items]
        layouts = [tree_layout(len(item.tokens), item.draft_parents) for item in items]
        pasts = [cache.length for cache in self._caches]
        self.positions = np.concatenate([past + layout.depths for past, layout in zip(pasts, layouts, strict=True)])
        views = {window: _view(layouts, pasts, window, groups, dtype, device) for window in dict.fromkeys(windows)}
        self._views = [views[window] for window in windows]

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Ragged, Ragged]:
        """Write rows [1, heads, sum of L_i, d] of one layer, each after the committed slots of its own sequence."""
        (firsts, masks), keys, values = self._views[layer_idx], list[Tensor](), list[Tensor]()
        fresh = (states.split_with_sizes(self._lengths, 2) for states in (key_states, value_states))
        for cache, first, key, value in zip(self._caches, firsts, *fresh, strict=True):
            all_keys, all_values = cache.update(key, value, layer_idx)
            keys.append(all_keys[:, :, first:] if first else all_keys)
            values.append(all_values[:, :, first:] if first else all_values)
        rows = Ragged(keys, values, self._lengths, masks)
        return rows, rows

    def __bool__(self) -> bool:
        return True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(cache.length for cache in self._caches)


def _view(
    layouts: Sequence[TreeLayout],
    pasts: Sequence[int],
    window: int | None,
    groups: int,
    dtype: torch.dtype,
    device: Any,
) -> tuple[list[int], list[Tensor | None]]:
    firsts = [first_visible(past, window) for past in pasts]
    mask = partial(attention_mask, window=window, groups=groups, dtype=dtype, device=device)
    masks = [
        None if len(layout) == 1 else mask(layout, past, first=first)  # one token sees every row from `first` on
        for layout, past, first in zip(layouts, pasts, firsts, strict=True)
    ]
    return firsts, masks


def logit_rows(items: Sequence[BatchItem]) -> NDArray[np.int64]:
    ends = np.cumsum([len(item) for item in items])
    spans = [np.arange(end - item.outputs, end) for item, end in zip(items, ends, strict=True)]
    return np.concatenate(spans).astype(np.int64)


def packed_ids(items: Sequence[BatchItem]) -> NDArray[np.int64]:
    return np.array([token for item in items for token in (*item.tokens, *item.draft_tokens)], dtype=np.int64)
