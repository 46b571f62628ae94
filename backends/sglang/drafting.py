"""Draft trees for all requests of a server, once per step (a round), and the flat arrays in which SGLang's NGRAM worker
takes them. Independent of SGLang's classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentspec.backends.engine_plugin.recorder import PATIENCE, Open, OutputUpdate, RecordingDrafter, wait_ready
from agentspec.backends.engine_plugin.request_state import EMPTY_TREE, Ending, RequestState, TokenTree
from agentspec.cache.index import DraftJob, Sourced
from agentspec.cache.tokens import EMPTY, Tokens
from agentspec.types import path_length

Int64s = NDArray[np.int64]


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


class TreeTurn(NamedTuple):
    """A request's part in a round: its last tokens `context`, and those of them that are new since its last round."""

    state: RequestState
    fresh: list[int]
    context: Tokens


class TreeDrafter(RecordingDrafter):
    """Drafts token trees for the requests of a server."""

    def __init__(
        self, open_cache: Open, vocabulary: int, *, shared: Sequence[Sourced] = (), on_close: Callable[[bool], None]
    ) -> None:
        """`shared` are indexes that every request is drafted from in addition to its own."""
        super().__init__(open_cache, vocabulary, on_close=on_close)
        self._shared = shared

    def record(self, state: RequestState, tokens: Tokens) -> None:
        """Record further tokens of the request's output, which are final."""
        self._recorder.extend([OutputUpdate(state, tokens, 0, 0)])

    def end(self, state: RequestState, ending: Ending) -> None:
        """End a request, and keep its output unless that was aborted."""
        self._recorder.end(state, ending)

    def draft(self, turns: Sequence[TreeTurn], nodes: int) -> list[TokenTree]:
        """A tree of at most `nodes` nodes for each request. SGLang verifies that many in any case."""
        started = perf_counter()
        try:
            self._learn(turns)
            wait_ready([turn.state for turn in turns if not turn.state.ready.is_set()], PATIENCE)
            trees = self._search(turns, nodes)
        except Exception as error:
            self._failures.report(error)
            trees = [EMPTY_TREE for _ in turns]
        for turn, tree in zip(turns, trees, strict=True):
            turn.state.tree = tree
        self.stats.add(perf_counter() - started, [len(tree.tokens) for tree in trees])
        return trees

    def _learn(self, turns: Sequence[TreeTurn]) -> None:
        """Count what became of the last trees, and follow the text in what clients predicted."""
        updates: list[OutputUpdate] = []
        for state, fresh, _ in turns:
            if state.predicted is not None:
                state.predicted.follow(fresh)
            if drafted := len(state.tree.tokens):
                right = path_length(*state.tree, fresh)
                self.stats.accepted += right
                updates.append(OutputUpdate(state, EMPTY, drafted, right))
        self._recorder.extend(updates)

    def _search(self, turns: Sequence[TreeTurn], nodes: int) -> list[TokenTree]:
        trees = [chain(turn.state.from_prediction(nodes)) for turn in turns]
        jobs = [None if tree.tokens else self._job(turn, nodes) for turn, tree in zip(turns, trees, strict=True)]
        for turn, tree in zip(turns, trees, strict=True):
            turn.state.source = "prediction" if tree.tokens else "cache"
        for row, draft in enumerate(self._rounds.search(jobs, PATIENCE)):
            if draft is not None:
                trees[row] = TokenTree(draft.tokens.tolist(), draft.parents.tolist())
        return [within(tree, self._vocabulary) for tree in trees]

    def _job(self, turn: TreeTurn, nodes: int) -> DraftJob | None:
        """The search for a request; None if its cache is not open, or no drafts are made for it."""
        state = turn.state
        cache = state.cache  # the recorder may take it away meanwhile
        if cache is None or not state.drafts:
            return None
        return cache.drafter, [*state.indexes, *self._shared], turn.context, nodes, 0.0, False
