"""Drafts made safe: only ids the model has, within the budget, whole paths."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.torch.drafters.base import make_draft
from agentspec.backends.torch.engine.speculator import Proposal, depth_first, subtree, usable
from agentspec.speculation.governor import best_nodes


@given(st.lists(st.tuples(st.integers(-3, 12), st.floats(0, 1)), max_size=20), st.integers(0, 20), st.data())
def test_what_is_left_is_legal_closed_and_within_budget(
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
