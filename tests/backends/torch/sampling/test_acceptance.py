"""Accepting a path, by itself."""

from __future__ import annotations

import bisect
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.torch.sampling.acceptance import accept_path


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    size = draw(st.integers(0, 12))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    return [draw(st.integers(0, 3)) for _ in range(size)], parents


@given(trees(), st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_emits_exactly_the_targets_tokens_whatever_the_tree(
    tree: tuple[list[int], list[int]], target: list[int]
) -> None:
    """The target's text is given; the walk follows the tree along it and stops one token behind."""
    tokens, parents = tree
    emitted: list[int] = []

    def emit(token: int, row: int) -> bool:
        emitted.append(token)
        return len(emitted) == len(target)

    path = accept_path(tokens, parents, lambda row: target[len(emitted)], emit)
    assert emitted == target[: len(emitted)]
    assert [tokens[node] for node in path] == emitted[:-1]
    assert all(parents[node] == before for before, node in zip([-1, *path], path, strict=False))
    if len(emitted) < len(target):
        assert not any(
            p == (path[-1] if path else -1) and t == emitted[-1] for t, p in zip(tokens, parents, strict=True)
        )


def test_rows_belong_to_the_node_just_reached() -> None:
    rows: list[int] = []
    answers = {0: 5, 2: 6, 3: 7}

    def choose(row: int) -> int:
        rows.append(row)
        return answers[row]

    assert accept_path([4, 5, 6], [-1, -1, 1], choose, lambda token, row: False) == [1, 2]
    assert rows == [0, 2, 3]


def test_nothing_is_drawn_after_the_end() -> None:
    draws = iter([5])
    assert accept_path([5, 6], [-1, 0], lambda row: next(draws), lambda token, row: True) == []


@pytest.mark.parametrize(
    ("tokens", "parents"), [([], []), ([0], [-1]), ([0, 1], [-1, 0]), ([0, 1, 2, 0], [-1, -1, 0, 1])]
)
def test_the_joint_law_of_two_tokens_is_the_targets(tokens: Sequence[int], parents: Sequence[int]) -> None:
    """Enumerated: independent draws give the product law with and without a tree, within sampling error."""
    rng = random.Random(0)
    law = np.array(
        [[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5], [0.2, 0.2, 0.6]]
    )  # by previous token; 3 = none
    bounds = law.cumsum(1)[:, :2].tolist()  # of a number below 1, in the order of the tokens
    counts: Counter[tuple[int, int]] = Counter()
    draws = 40_000
    for _ in range(draws):
        counts[two_tokens(tokens, parents, bounds, rng)] += 1
    expected = {(a, b): law[3][a] * law[a][b] for a in range(3) for b in range(3)}
    assert sum(abs(counts[pair] / draws - p) for pair, p in expected.items()) / 2 < 0.01


def two_tokens(
    tokens: Sequence[int], parents: Sequence[int], bounds: Sequence[Sequence[float]], rng: random.Random
) -> tuple[int, int]:
    text: list[int] = []

    def emit(token: int, row: int) -> bool:
        text.append(token)
        return len(text) >= 2

    def choose(row: int) -> int:
        return bisect.bisect(bounds[text[-1] if text else 3], rng.random())

    while len(text) < 2:
        rest = (tokens, parents) if not text else ((), ())
        accept_path(*rest, choose, emit)
    return text[0], text[1]
