"""The arrays that SGLang verifies hold exactly the paths of the tree that was drafted."""

from __future__ import annotations

import random

import numpy as np
import pytest

from agentspec.backends.engine_plugin.drafter import within
from agentspec.backends.engine_plugin.request_state import EMPTY_TREE, TokenTree
from agentspec.backends.sglang.drafting import to_arrays
from agentspec.types import path_length
from tests.backends.sglang.conftest import parents_of, verified


def random_tree(rng: random.Random, most: int, vocabulary: int = 4) -> TokenTree:
    """A tree in which siblings carry distinct tokens."""
    tokens, parents = list[int](), list[int]()
    for _ in range(rng.randrange(most + 1)):
        parent, token = rng.randrange(-1, len(tokens)), rng.randrange(1, vocabulary)
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return TokenTree(tokens, parents)


@pytest.mark.parametrize("seed", range(50))
def test_random_trees_are_verified_as_what_they_are(seed: int) -> None:
    rng = random.Random(seed)
    nodes = rng.randrange(2, 20)
    trees = [random_tree(rng, nodes - 1) for _ in range(rng.randrange(1, 5))]
    tokens, mask = to_arrays([9] * len(trees), trees, nodes)
    tokens, mask = tokens.reshape(-1, nodes), mask.reshape(-1, nodes, nodes)
    for row, tree in enumerate(trees):
        assert tokens[row, 0] == 9
        parents = parents_of(mask[row])
        siblings = list(zip(parents, tokens[row].tolist(), strict=True))
        assert len(set(siblings)) == nodes
        for node in range(nodes):
            above = {node} | ({*np.flatnonzero(mask[row, parents[node]]).tolist()} if node else set())
            assert {*np.flatnonzero(mask[row, node]).tolist()} == above
        for _ in range(30):
            text = [rng.randrange(1, 4) for _ in range(6)]
            assert verified(tokens[row].tolist(), parents, text) == path_length(*tree, text)


def test_tokens_that_the_model_does_not_know_go_with_all_below() -> None:
    tree = TokenTree([1, 50, 2, 3, 4], [-1, 0, 1, 0, 3])
    assert within(tree, 50) == TokenTree([1, 3, 4], [-1, 0, 1])
    assert within(tree, 51) is tree
    assert within(EMPTY_TREE, 5) is EMPTY_TREE
