"""Draft trees as SGLang's NGRAM worker takes them: flat arrays of a fixed number of nodes, with an ancestor mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


class TokenTree(NamedTuple):
    """Tokens that may follow a context. `parents[i]` < i is a node, or -1 for the context itself."""

    tokens: list[int]
    parents: list[int]


EMPTY_TREE = TokenTree([], [])


def chain(tokens: Sequence[int]) -> TokenTree:
    return TokenTree(list(tokens), list(range(-1, len(tokens) - 1)))


def within(tree: TokenTree, vocabulary: int) -> TokenTree:
    """The tree without nodes whose token, or that of a node above, is not in the vocabulary."""
    if max(tree.tokens, default=0) < vocabulary:
        return tree
    kept: dict[int, int] = {-1: -1}
    tokens, parents = list[int](), list[int]()
    for node, (token, parent) in enumerate(zip(*tree, strict=True)):
        if token < vocabulary and parent in kept:
            kept[node] = len(tokens)
            tokens.append(token)
            parents.append(kept[parent])
    return TokenTree(tokens, parents)


def to_arrays(last_tokens: Sequence[int], trees: Sequence[TokenTree], nodes: int) -> tuple[Int64s, Int64s]:
    """The trees of a batch of requests, flat: tokens of shape (requests * nodes,), and a mask of shape
    (requests * nodes * nodes,) that is 1 where the column's node is the row's node or above it.

    Node 0 of each tree is its request's last token, so that a tree has at most `nodes` - 1 nodes. A smaller one is
    filled up with a chain of token 0 below its last node: siblings stay distinct, which sampling relies on.
    """
    batch = len(trees)
    tokens, parents = np.zeros((batch, nodes), np.int64), np.zeros((batch, nodes), np.int64)
    tokens[:, 0] = last_tokens
    parents[:, 1:] = np.arange(nodes - 1)
    for row, tree in enumerate(trees):
        count = len(tree.tokens)
        tokens[row, 1 : count + 1] = tree.tokens
        parents[row, 1 : count + 1] = np.array(tree.parents, dtype=np.int64) + 1
    mask = np.zeros((batch, nodes, nodes), np.int64)
    mask[:, 0, 0] = 1
    rows = np.arange(batch)
    for node in range(1, nodes):
        mask[:, node] = mask[rows, parents[:, node]]
        mask[:, node, node] = 1
    return tokens.reshape(-1), mask.reshape(-1)
