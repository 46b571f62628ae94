"""Accepting a path of a draft tree, by itself."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.torch.drafters.base import make_draft
from agentspec.backends.torch.engine.speculator import Proposal, accept_path, depth_first, subtree, usable
from agentspec.speculation.governor import best_nodes


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
