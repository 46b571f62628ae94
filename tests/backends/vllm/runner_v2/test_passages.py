"""Which paths of a draft tree become passages, and their layout."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.vllm.runner_v2.passages import STEPS_BEHIND, PassageShape, likeliest_paths, passages, shape_for
from agentspec.types import Draft


def tree(parents: list[int]) -> Draft:
    """A tree whose node i has the token 100 + i."""
    count = len(parents)
    return Draft(
        np.arange(100, 100 + count, dtype=np.int32),
        np.array(parents, dtype=np.int32),
        np.linspace(1.0, 0.5, count, dtype=np.float32),
        np.ones(count, dtype=np.int32),
        np.zeros(count, dtype=np.uint8),
    )


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    count = draw(st.integers(0, 12))
    return [draw(st.integers(-1, node - 1)) for node in range(count)]


@given(trees(), st.integers(1, 5))
def test_paths_are_whole_and_hold_the_first_nodes(parents: list[int], count: int) -> None:
    paths = likeliest_paths(tree(parents), count)
    assert len(paths) <= count
    for path in paths:
        nodes = [token - 100 for token in path]
        assert [parents[node] for node in nodes] == [-1, *nodes[:-1]]
        assert nodes[-1] not in parents, "a path ends at a leaf"
    held: set[int] = set()
    for path in paths:  # each is there for the first node that those before it lack
        assert min(set(range(len(parents))) - held) + 100 in path
        held.update(token - 100 for token in path)
    assert len(paths) == count or held == set(range(len(parents)))


def test_a_passage_begins_with_known_text_and_is_filled_up() -> None:
    shape = PassageShape(rows=3, overlap=2, width=5)
    rows = passages([[7, 8, 9, 10], [7]], np.array([4, 5, 6], dtype=np.int32), shape)
    assert rows.tolist() == [[5, 6, 7, 8, 9], [5, 6, 7, -1, -1], [-1] * 5]
    assert all(shape_for(count).ahead == STEPS_BEHIND * (count + 1) + count for count in (1, 7, 32))
    assert passages([[7]], np.array([6], dtype=np.int32), shape)[0].tolist() == [6, 7, -1, -1, -1]
