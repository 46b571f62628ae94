"""The arrays that SGLang verifies hold exactly the paths of the tree that was drafted."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.engine_plugin.drafter import within
from agentspec.backends.engine_plugin.request_state import EMPTY_TREE, TokenTree
from agentspec.backends.sglang.drafting import to_arrays
from agentspec.types import path_length
from tests.backends.sglang.cpu.sgl_kernel import reconstruct_indices_from_tree_mask, verify_tree_greedy_cpu

NODES, LENGTH = 12, 100


@st.composite
def token_trees(draw: st.DrawFn) -> TokenTree:
    """Trees in which siblings carry distinct tokens."""
    tokens, parents = list[int](), list[int]()
    for word in draw(st.lists(st.integers(0, 3 * NODES), max_size=NODES - 1)):
        parent, token = word // 3 % (len(tokens) + 1) - 1, 1 + word % 3
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return TokenTree(tokens, parents)


@given(st.lists(token_trees(), min_size=1, max_size=3), st.lists(st.integers(1, 3), min_size=NODES, max_size=NODES))
def test_trees_are_verified_as_what_they_are(trees: list[TokenTree], text: list[int]) -> None:
    """By the kernels with which whole servers run in tests; the target's tokens are those of the text."""
    shape = len(trees), NODES
    tokens, mask = map(torch.from_numpy, to_arrays([9] * len(trees), trees, NODES))
    index, child, sibling, depths, predicts, path = torch.full((6, *shape), -1)
    lengths, accepted = torch.full((2, len(trees)), LENGTH)
    reconstruct_indices_from_tree_mask(mask, lengths, depths, index, child, sibling, *shape)
    verify_tree_greedy_cpu(
        predicts=predicts.view(-1), accept_index=path, accept_token_num=accepted, candidates=tokens.view(shape),
        retrive_index=index, retrive_next_token=child, retrive_next_sibling=sibling,
        target_predict=torch.tensor(text)[depths - LENGTH],
    )  # fmt: skip
    assert accepted.tolist() == [path_length(*tree, text) for tree in trees]
    for row, sees in enumerate(mask.view(*shape, NODES).bool()):
        parents = torch.where(sees.tril(-1), torch.arange(NODES), -1).amax(-1).tolist()
        assert len({*zip(parents, tokens.view(shape)[row].tolist(), strict=True)}) == NODES  # siblings are distinct
        for node in range(1, NODES):
            assert (sees[node] == sees[parents[node]]).tolist() == [other != node for other in range(NODES)]


def test_tokens_that_the_model_does_not_know_go_with_all_below() -> None:
    tree = TokenTree([1, 50, 2, 3, 4], [-1, 0, 1, 0, 3])
    assert within(tree, 50) == TokenTree([1, 3, 4], [-1, 0, 1])
    assert within(tree, 51) is tree
    assert within(EMPTY_TREE, 5) is EMPTY_TREE
