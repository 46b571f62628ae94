"""Slots of one sequence against a plain list of rows."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentspec.backends.torch.model.kv_cache import SequenceCache

LAYERS = 2


def write(cache: SequenceCache, values: list[int]) -> list[Tensor]:
    """One forward: every layer writes a row per value; returns the rows each layer then sees."""
    rows = torch.tensor(values, dtype=torch.float32).view(1, 1, -1, 1).expand(1, 2, -1, 3)
    seen = []
    for layer in range(LAYERS):
        keys, _ = cache.update(rows + layer, -rows - layer, layer)
        seen.append(keys)
    return seen


def held(cache: SequenceCache) -> list[int]:
    """The values in the committed rows, the same in every layer, keys and values."""
    empty = torch.empty(1, 2, 0, 3)
    columns = []
    for layer in range(LAYERS):
        keys, values = cache.update(empty, empty, layer)
        assert torch.equal(keys + values, torch.zeros_like(keys))
        columns.append((keys[0, 0, :, 0] - layer).tolist())
    assert columns[0] == columns[1]
    return [int(value) for value in columns[0]]


@settings(deadline=None)
@given(st.data())
def test_rows_are_those_of_the_committed_tokens(data: st.DataObject) -> None:
    cache, model = SequenceCache(data.draw(st.integers(1, 8))), list[int]()
    for step in range(data.draw(st.integers(1, 8))):
        chain = [1000 * step + i for i in range(data.draw(st.integers(1, 5)))]
        tree = [1000 * step + 500 + i for i in range(data.draw(st.integers(0, 6)))]
        path = sorted(data.draw(st.sets(st.integers(0, len(tree) - 1)))) if tree else []
        seen = write(cache, chain + tree)
        assert seen[0][0, 0, :, 0].tolist() == [float(v) for v in model + chain + tree]
        cache.commit(len(chain), path)
        model += chain + [tree[node] for node in path]
        if data.draw(st.booleans()):
            keep = data.draw(st.integers(0, len(model)))
            cache.truncate(keep)
            del model[keep:]
        assert cache.length == cache.get_seq_length() == len(model)
        if model:
            assert held(cache) == model


def test_an_interrupted_forward_changes_nothing() -> None:
    cache = SequenceCache(2)
    write(cache, [1, 2])
    cache.commit(2, ())
    cache.update(torch.ones(1, 2, 3, 3), torch.ones(1, 2, 3, 3), 0)  # the second layer never comes
    write(cache, [3])
    cache.commit(1, ())
    assert held(cache) == [1, 2, 3]
