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
from transformers import Cache

from agentspec.backends.torch.model.attention import Ragged
from agentspec.backends.torch.model.kv_cache import KVCache, SequenceCache
from agentspec.backends.torch.model.tree_mask import TreeLayout, attention_mask, first_visible, tree_layout


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One sequence's part of a forward: tokens that follow its committed slots, then a draft tree below the last token.

    `needs_logits` is False for all but the last chunk of a prompt.
    """

    kv_cache: KVCache
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


@dataclass(frozen=True, slots=True)
class LayerView:
    """What one kind of layer sees of each sequence: `firsts` are the first visible slots, `masks` the masks."""

    firsts: Sequence[int]
    masks: Sequence[Tensor | None]


class PackedCache(Cache):
    """Presents the caches of several sequences as one cache for a single forward.

    `update` writes each sequence's slots and returns a `Ragged`, which only `packed_attention` understands.
    `windows` says for each layer how far it looks back (None: everything).
    """

    def __init__(
        self, items: Sequence[BatchItem], windows: Sequence[int | None], groups: int, dtype: torch.dtype, device: Any
    ) -> None:
        super().__init__(layers=[])
        self._caches = [_sequence_cache(item.kv_cache) for item in items]
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
        view, keys, values = self._views[layer_idx], list[Tensor](), list[Tensor]()
        fresh = zip(
            key_states.split_with_sizes(self._lengths, 2),
            value_states.split_with_sizes(self._lengths, 2),
            strict=True,
        )
        for cache, first, (key, value) in zip(self._caches, view.firsts, fresh, strict=True):
            all_keys, all_values = cache.update(key, value, layer_idx)
            keys.append(all_keys[:, :, first:] if first else all_keys)
            values.append(all_values[:, :, first:] if first else all_values)
        rows = Ragged(keys, values, self._lengths, view.masks)
        return rows, rows

    def __bool__(self) -> bool:
        return True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(cache.length for cache in self._caches)


def _sequence_cache(kv_cache: KVCache) -> SequenceCache:
    assert isinstance(kv_cache, SequenceCache), "a model without a rewindable cache cannot be batched"
    return kv_cache


def _view(
    layouts: Sequence[TreeLayout],
    pasts: Sequence[int],
    window: int | None,
    groups: int,
    dtype: torch.dtype,
    device: Any,
) -> LayerView:
    firsts = [first_visible(past, window) for past in pasts]
    mask = partial(attention_mask, window=window, groups=groups, dtype=dtype, device=device)
    masks = [
        None if len(layout) == 1 else mask(layout, past, first=first)  # one token sees every row from `first` on
        for layout, past, first in zip(layouts, pasts, firsts, strict=True)
    ]
    return LayerView(firsts, masks)


def logit_rows(items: Sequence[BatchItem]) -> NDArray[np.int64]:
    """Which rows of the packed forward's tokens need logits, ascending."""
    ends = np.cumsum([len(item) for item in items])
    spans = [np.arange(end - item.outputs, end) for item, end in zip(items, ends, strict=True)]
    return np.concatenate(spans).astype(np.int64)


def packed_ids(items: Sequence[BatchItem]) -> NDArray[np.int64]:
    """The token ids of the packed forward."""
    return np.array([token for item in items for token in (*item.tokens, *item.draft_tokens)], dtype=np.int64)
