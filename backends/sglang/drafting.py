"""The drafter of SGLang's requests, and the flat arrays in which its NGRAM worker takes draft trees. Independent of
SGLang's classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentspec.backends.engine_plugin.drafter import ServerDrafter
from agentspec.backends.engine_plugin.recorder import OutputUpdate
from agentspec.backends.engine_plugin.request_state import RequestState, TokenTree
from agentspec.cache.tokens import EMPTY, Tokens

Int64s = NDArray[np.int64]


class TreeDrafter(ServerDrafter):
    """Drafts before the scheduler has processed the last step: what it may still cut off is followed, not recorded."""

    def record(self, state: RequestState, fresh: Tokens) -> None:
        """Record further tokens of the request's output, which are final."""
        self._recorder.extend([OutputUpdate(state, fresh, 0, 0, state.source)])

    def _update(self, state: RequestState, fresh: Tokens) -> OutputUpdate:
        return super()._update(state, fresh)._replace(tokens=EMPTY)


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
