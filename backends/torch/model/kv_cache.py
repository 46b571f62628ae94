"""The KV slots of one sequence: preallocated, written at their positions, and rewound by lowering the length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from agentspec.backends.torch.model.device import to_device

GROWTH = 1.5
FIRST_SLOTS = 64


class SequenceCache(Cache):
    """Slots 0..length-1 belong to committed tokens: the slot of each token has the index of its position.

    A forward writes its tokens' slots after the committed ones; `commit` then keeps the accepted slots and drops the
    others. All layers keep all slots, even sliding-window layers, whose windows the mask applies: so rewinding is
    always possible. Not thread-safe.
    """

    def __init__(self, capacity: int = FIRST_SLOTS) -> None:
        super().__init__(layers=[])
        self.length = 0
        self.capacity = max(capacity, 1)
        self._keys: list[Tensor | None] = []
        self._values: list[Tensor | None] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write rows [1, heads, L, d] of one layer after its committed slots; return all slots, including the new."""
        while len(self._keys) <= layer_idx:
            self._keys.append(None)
            self._values.append(None)
        end = self.length + key_states.shape[-2]
        self.reserve(end)
        keys = self._write(self._keys, layer_idx, key_states, end)
        return keys, self._write(self._values, layer_idx, value_states, end)

    def _write(self, store: list[Tensor | None], layer: int, states: Tensor, end: int) -> Tensor:
        rows = store[layer]
        if rows is None or rows.shape[-2] < end:
            rows = store[layer] = _room(rows, states, self.length, self.capacity)
        rows[:, :, self.length : end] = states
        return rows[:, :, :end]

    def reserve(self, slots: int) -> None:
        """Raise the capacity to at least `slots` slots. Each layer allocates when it is next written, so that growth
        cannot fail half-way.
        """
        if slots > self.capacity:
            self.capacity = max(slots, int(self.capacity * GROWTH))

    @torch.inference_mode()
    def commit(self, num_tokens: int, path: Sequence[int]) -> None:
        """Keep the slots of the last forward's `num_tokens` tokens and of the tree nodes in `path` (ascending), and
        drop the rest.
        """
        moved = next((i for i, node in enumerate(path) if node != i), len(path))
        start = self.length + num_tokens
        if moved < len(path):
            self._gather(start + moved, [start + node for node in path[moved:]])
        self.length = start + len(path)

    def _gather(self, target: int, rows: Sequence[int]) -> None:
        tensors = [tensor for tensor in (*self._keys, *self._values) if tensor is not None]
        index = to_device(torch.tensor(rows), tensors[0].device)
        for tensor in tensors:
            tensor[:, :, target : target + len(rows)] = tensor.index_select(2, index)

    def truncate(self, length: int) -> None:
        """Drop every slot from `length` on."""
        assert 0 <= length <= self.length, f"cannot truncate {self.length} slots to {length}"
        self.length = length

    def copy(self, length: int, capacity: int) -> SequenceCache:
        """An independent cache with a copy of the first `length` slots and room for `capacity` slots."""
        assert 0 <= length <= self.length, f"cannot copy {length} of {self.length} slots"
        other = SequenceCache(max(length, capacity))
        other.length = length
        other._keys = [_copied(tensor, length, other.capacity) for tensor in self._keys]
        other._values = [_copied(tensor, length, other.capacity) for tensor in self._values]
        return other

    @property
    def nbytes(self) -> int:
        """Bytes allocated, including unused capacity."""
        return sum(t.numel() * t.element_size() for t in (*self._keys, *self._values) if t is not None)

    @torch.inference_mode()
    def fill_blank(self, length: int) -> None:
        """Commit `length` slots of zeros, for timing only. Needs an earlier forward, which creates the layers."""
        self.reserve(length)
        for store in (self._keys, self._values):
            for layer, tensor in enumerate(store):
                if tensor is not None:
                    store[layer] = tensor = _room(None, tensor, 0, self.capacity)
                    tensor[:, :, :length] = 0
        self.length = length

    def __bool__(self) -> bool:
        return True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.length + query_length, 0


def _room(rows: Tensor | None, like: Tensor, length: int, capacity: int) -> Tensor:
    """A new tensor for `capacity` slots, with a copy of the first `length` slots of `rows`."""
    room = like.new_empty((*like.shape[:-2], capacity, like.shape[-1]))
    if rows is not None:
        room[:, :, :length] = rows[:, :, :length]
    return room


def _copied(tensor: Tensor | None, length: int, capacity: int) -> Tensor | None:
    if tensor is None:
        return None
    rows = tensor.new_empty((*tensor.shape[:-2], capacity, tensor.shape[-1]))
    rows[:, :, :length] = tensor[:, :, :length]
    return rows


class StateCache:
    """The model's own cache, for a model whose state cannot be rewound: tokens can only be added."""

    def __init__(self, config: Any) -> None:
        self.native = DynamicCache(config=config)
        self.length = 0

    def commit(self, num_tokens: int, path: Sequence[int]) -> None:
        assert not path, "a model without a rewindable cache was given a draft"
        self.length += num_tokens


KVCache = SequenceCache | StateCache
