"""Masks against the definition: a token sees its ancestors, within the window, by position."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.torch.model.batch import attention_mask, tree_layout


@given(st.data())
def test_mask_is_ancestry_within_the_window(data: st.DataObject) -> None:
    chain, past = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 6))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(data.draw(st.integers(0, 6)))]
    window = data.draw(st.none() | st.integers(1, 8))
    layout = tree_layout(chain, parents)
    mask = attention_mask(layout, past, window=window, groups=1, dtype=torch.float32)[0, 0]
    for row in range(chain + len(parents)):
        line = list(range(past)) + [past + column for column in ancestry(row, chain, parents)]  # columns by position
        visible = line if window is None else line[-window:]
        assert layout.depths[row] == len(line) - 1 - past
        assert torch.nonzero(mask[row] == 0).flatten().tolist() == visible


def ancestry(row: int, chain: int, parents: list[int]) -> list[int]:
    if row < chain:
        return list(range(row + 1))
    return [*ancestry(chain + parents[row - chain], chain, parents), row]
