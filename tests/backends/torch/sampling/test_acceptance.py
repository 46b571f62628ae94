"""Accepting a path, by itself: by the exact rule, and by a lossy one, which may accept only typical tokens."""

from __future__ import annotations

import bisect
import math
import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.torch.drafters.base import make_draft
from agentspec.backends.torch.engine.speculator import Proposal, accept_path, depth_first, subtree, usable
from agentspec.backends.torch.sampling.acceptance import Substitutes, typical_bound
from agentspec.speculation.governor import best_nodes
from agentspec.types import LossyAcceptance, Source


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    size = draw(st.integers(0, 12))
    parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
    return [draw(st.integers(0, 3)) for _ in range(size)], parents


@given(trees(), st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_exactly_the_targets_tokens_are_emitted_for_any_tree(
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
    sampler: Any = SimpleNamespace(probabilities=lambda row: law, constraints=None, may_draw=lambda token: True)
    substitutes = Substitutes(LossyAcceptance(epsilon=epsilon, delta=delta), sampler)
    substitutes.begin(tokens, [Source.MODEL] * len(tokens))
    node = substitutes.choose(0, range(len(tokens)))
    entropy = -sum(float(p) * math.log(float(p)) for p in law if p > 0)
    bound = min(epsilon, delta * math.exp(-entropy))
    typical = [token for token in tokens if float(law[token]) > bound + 1e-6]
    if node is None:
        assert not typical
    else:
        assert float(law[tokens[node]]) > bound - 1e-6
        assert float(law[tokens[node]]) == max(float(law[token]) for token in tokens)


def test_the_targets_own_draw_comes_first_and_rows_follow_accepted_nodes() -> None:
    """The own draw 7 is no child of the root, so that the rule takes node 1; below it the own draw 9 is node 2."""
    asked: list[tuple[int, list[int]]] = []

    class Second:
        def choose(self, row: int, nodes: Any) -> int | None:
            asked.append((row, list(nodes)))
            return nodes[-1] if row == 0 else None

    draws, emitted, second = {0: 7, 2: 9, 3: 5}, list[int](), Second()
    path = accept_path(
        [4, 5, 9, 8], [-1, -1, 1, 2], draws.__getitem__, lambda token, row: bool(emitted.append(token)), second
    )
    assert path == [1, 2] and emitted == [5, 9, 5] and asked == [(0, [0, 1]), (3, [3])]


@given(st.lists(st.tuples(st.integers(-3, 12), st.floats(0, 1)), max_size=20), st.integers(0, 20), st.data())
def test_usable_drafts_are_legal_closed_and_within_budget(
    nodes: list[tuple[int, float]], budget: int, data: st.DataObject
) -> None:
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(len(nodes))]
    tokens = [token for token, _ in nodes]
    draft = make_draft(tokens, parents, [p for _, p in nodes], [0] * len(nodes), [1] * len(nodes))
    kept = usable(draft, 10, budget)
    assert len(kept.tokens) <= budget
    assert all(0 <= token < 10 for token in kept.tokens)
    assert all(-1 <= parent < node for node, parent in enumerate(kept.parents))
    legal = legal_paths(tokens, parents)
    assert legal_paths(kept.tokens, kept.parents) <= legal
    if budget >= len(nodes):
        assert len(kept.tokens) == sum(node_is_legal(tokens, parents, node) for node in range(len(tokens)))


def node_is_legal(tokens: Sequence[int], parents: Sequence[int], node: int) -> bool:
    return node < 0 or (0 <= tokens[node] < 10 and node_is_legal(tokens, parents, parents[node]))


def legal_paths(tokens: Sequence[int], parents: Sequence[int]) -> set[tuple[int, ...]]:
    def path(node: int) -> tuple[int, ...]:
        return () if node < 0 else (*path(parents[node]), tokens[node])

    return {path(node) for node in range(len(tokens)) if node_is_legal(tokens, parents, node)}


@given(st.data())
def test_the_likeliest_path_comes_first(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(count)]
    worth: list[float] = []
    for parent in parents:
        worth.append((worth[parent] if parent >= 0 else 1.0) * data.draw(st.sampled_from([0.9, 0.5, 0.1])))
    whole = Proposal(range(count), parents, worth, [0] * count, worth)
    kept = best_nodes(worth, data.draw(st.integers(0, count)))
    order = depth_first(whole, kept)
    assert sorted(order) == sorted(kept)
    path, node = list[int](), -1
    while children := [child for child in kept if parents[child] == node]:
        node = max(children, key=lambda child: (worth[child], -child))
        path.append(node)
    assert order[: len(path)] == path
    part = subtree(whole, order)
    assert all(parent < node for node, parent in enumerate(part.parents))
    assert [part.tokens[parent] if parent >= 0 else -1 for parent in part.parents] == [parents[n] for n in order]
