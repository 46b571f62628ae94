"""Typical acceptance, by itself and in the engine: what it may accept, and what it never may."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.torch.sampling.acceptance import accept_path
from agentspec.backends.torch.sampling.typical import TypicalAcceptance, typical_bound


def test_the_bound_is_the_published_one() -> None:
    even = torch.full((64,), 1 / 64)
    assert typical_bound(even, 0.09, 0.3) == pytest.approx(0.3 / 64)
    sure = torch.tensor([1.0, 0.0, 0.0])
    assert typical_bound(sure, 0.09, 0.3) == 0.09
    two = torch.tensor([0.5, 0.5])
    assert typical_bound(two, 0.9, 0.3) == pytest.approx(0.3 * math.exp(-math.log(2)))


@given(
    st.lists(st.floats(-6, 6), min_size=6, max_size=6),
    st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True),
    st.floats(0.01, 0.9),
    st.floats(0.01, 1.0),
)
def test_only_typical_tokens_are_accepted(scores: list[float], tokens: list[int], epsilon: float, delta: float) -> None:
    law = torch.tensor(scores).softmax(-1)
    node = TypicalAcceptance(tokens, lambda row: law, epsilon=epsilon, delta=delta).choose(0, range(len(tokens)))
    entropy = -sum(float(p) * math.log(float(p)) for p in law if p > 0)
    bound = min(epsilon, delta * math.exp(-entropy))
    typical = [token for token in tokens if float(law[token]) > bound + 1e-6]
    if node is None:
        assert not typical
    else:
        assert float(law[tokens[node]]) > bound - 1e-6
        assert float(law[tokens[node]]) == max(float(law[token]) for token in tokens)


def test_the_targets_own_draw_comes_first_and_rows_follow_what_was_accepted() -> None:
    """The own draw 7 is no child of the root, so that the policy takes node 1; below it the own draw 9 is node 2."""
    asked: list[tuple[int, list[int]]] = []

    class Second:
        def choose(self, row: int, nodes: Any) -> int | None:
            asked.append((row, list(nodes)))
            return nodes[-1] if row == 0 else None

    draws, emitted = {0: 7, 2: 9, 3: 5}, list[int]()
    path = accept_path(
        [4, 5, 9, 8], [-1, -1, 1, 2], draws.__getitem__, lambda token, row: bool(emitted.append(token)), Second()
    )
    assert path == [1, 2] and emitted == [5, 9, 5] and asked == [(0, [0, 1]), (3, [3])]
