"""The KV slots of one sequence: preallocated, written at their positions, and rewound by lowering the length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache

from agentspec.backends.torch.model.device import to_device

GROWTH = 1.5
FIRST_SLOTS = 64


class SequenceCache(Cache):
    """Slots 0..length-1 belong to committed tokens: the slot of each token has the index of its position.

    A forward writes its tokens' slots after the committed ones; `commit` then keeps the accepted slots and drops the
    others. All layers keep all slots, even sliding-window layers, as the mask applies their windows: so rewinding is
    always possible. Not thread-safe.
    """

    def __init__(self, capacity: int = FIRST_SLOTS) -> None:
        super().__init__(layers=[])
        self.length = 0
        self.capacity = max(capacity, 1)
        self._keys: list[Tensor | None] = []
        self._values: list[Tensor | None] = []
        self._addresses: NDArray[np.int64] | None = None  # of layers with at least `_room` slots
        self._room = 0

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
        rows = self._fit(store, layer, states, end)
        rows[:, :, self.length : end] = states
        return rows[:, :, :end]

    def addresses(self, like: Sequence[tuple[Tensor, Tensor]], end: int) -> NDArray[np.int64]:
        """Make room for `end` slots and return where they are: for each layer the addresses of its keys and values, and
        the elements between two heads, [3 * layers]. `like` are keys and values of each layer, as `update` takes them.
        """
        if self._addresses is None or end > self._room:
            self.reserve(end)
            if not self._keys:
                self._keys, self._values = [None] * len(like), [None] * len(like)
            pairs = [
                (self._fit(self._keys, layer, keys, end), self._fit(self._values, layer, values, end))
                for layer, (keys, values) in enumerate(like)
            ]
            self._room = min(keys.shape[-2] for keys, _ in pairs)
            self._addresses = np.array([[k.data_ptr(), v.data_ptr(), k.stride(1)] for k, v in pairs]).reshape(-1)
        return self._addresses

    def _fit(self, store: list[Tensor | None], layer: int, like: Tensor, end: int) -> Tensor:
        rows = store[layer]
        return self._allocate(store, layer, like) if rows is None or rows.shape[-2] < end else rows

    def _allocate(self, store: list[Tensor | None], layer: int, like: Tensor) -> Tensor:
        self._addresses = None
        store[layer] = rows = _room(store[layer], like, self.length, self.capacity)
        return rows

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
        tensors = self._tensors
        index = to_device(torch.tensor(rows), tensors[0].device)
        for tensor in tensors:
            tensor[:, :, target : target + len(rows)] = tensor.index_select(2, index)

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length, f"cannot truncate {self.length} slots to {length}"
        self.length = length

    def rows(self, start: int, end: int, *, release: bool = False) -> Rows:
        """A copy of the slots from `start` to `end`. With `release`, each layer is freed once it is copied, so that the
        two are never in memory as a whole; the cache cannot be used afterwards.
        """
        assert 0 <= start <= end <= self.length, f"cannot copy slots {start} to {end} of {self.length}"
        return Rows(*(_copied(store, start, end, release) for store in (self._keys, self._values)))

    @classmethod
    def joined(cls, parts: Sequence[RowsPart], capacity: int) -> SequenceCache:
        """A cache with a copy of the slots of `parts`, one after another, and room for `capacity` slots."""
        length = sum(part.length for part in parts)
        cache = cls(max(length, capacity))
        cache.length = length
        for layer in range(len(parts[0].rows.keys) if parts else 0):
            cache._keys.append(_joined(parts, lambda rows: rows.keys, layer, cache.capacity))
            cache._values.append(_joined(parts, lambda rows: rows.values, layer, cache.capacity))
        return cache

    @property
    def _tensors(self) -> list[Tensor]:
        return [tensor for tensor in (*self._keys, *self._values) if tensor is not None]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers; 0 before the first forward."""
        return sum(tensor.shape[-3] * tensor.shape[-1] * tensor.element_size() for tensor in self._tensors)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    @torch.inference_mode()
    def fill_blank(self, length: int) -> None:
        """Commit `length` slots of zeros, for timing only. Needs an earlier forward, which creates the layers."""
        self.reserve(length)
        for store in (self._keys, self._values):
            for layer, tensor in enumerate(store):
                if tensor is not None:
                    self._allocate(store, layer, tensor)[:, :, :length] = 0
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


Layers = list[Tensor | None]


@dataclass(slots=True, eq=False)
class Rows:
    """The slots of consecutive tokens: for each layer, keys and values [1, heads, tokens, d]."""

    keys: Layers
    values: Layers

    def split(self, at: int) -> tuple[Rows, Rows]:
        """Copies of the slots before `at` and of the others; each layer is freed once it is copied."""
        (keys, more_keys), (values, more_values) = (_split(store, at) for store in (self.keys, self.values))
        return Rows(keys, values), Rows(more_keys, more_values)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values) if tensor is not None)


@dataclass(frozen=True, slots=True)
class RowsPart:
    """The first `length` of some slots; with `release`, they are not needed any more once they are copied."""

    rows: Rows
    length: int
    release: bool = False


def _copied(store: Layers, start: int, end: int, release: bool) -> Layers:
    found: Layers = []
    for layer, tensor in enumerate(store):
        found.append(None if tensor is None else tensor[:, :, start:end].clone())
        if release:
            store[layer] = None
    return found


def _split(store: Layers, at: int) -> tuple[Layers, Layers]:
    head, tail = Layers(), Layers()
    for layer, tensor in enumerate(store):
        head.append(None if tensor is None else tensor[:, :, :at].clone())
        tail.append(None if tensor is None else tensor[:, :, at:].clone())
        store[layer] = None
    return head, tail


def _joined(parts: Sequence[RowsPart], store_of: Callable[[Rows], Layers], layer: int, capacity: int) -> Tensor | None:
    first = store_of(parts[0].rows)[layer]
    if first is None:
        return None
    room, at = _room(None, first, 0, capacity), 0
    for part in parts:
        store = store_of(part.rows)
        tensor = store[layer]
        assert tensor is not None, "parts of different models"
        room[:, :, at : at + part.length] = tensor[:, :, : part.length]
        at += part.length
        if part.release:
            store[layer] = None
    return room
