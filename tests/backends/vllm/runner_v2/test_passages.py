"""Which paths of a draft tree become passages, their layout, and how they follow a text."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentspec.backends.vllm.runner_v2.passages import STEPS_BEHIND, shape_for
from agentspec.cache.index import CERTAIN, IndexDrafter, Passages, SuffixIndex, find_passages, propose_batch
from agentspec.cache.tokens import as_tokens
from agentspec.types import Source

WIDTH, OVERLAP = 8, 3
texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def index_of(text: list[int]) -> SuffixIndex:
    index = SuffixIndex()
    index.append(0, as_tokens(text))
    return index


@given(texts, texts, st.integers(1, 5), st.integers(1, 12))
def test_paths_are_whole_and_hold_the_first_nodes(known: list[int], text: list[int], count: int, nodes: int) -> None:
    drafter, indexes, context = IndexDrafter(), [(index_of(known), Source.SHARED)], as_tokens(text)
    [tree] = propose_batch([(drafter, indexes, context, nodes, 0.0, False)])
    passages = Passages(context, rows=count, overlap=OVERLAP, width=OVERLAP + nodes)
    found, chances = find_passages([(passages, drafter, indexes, ())], nodes).reshape(2, count, -1)
    rows = [row for row in found.tolist() if row[OVERLAP] >= 0]
    paths = [[token for token in row[OVERLAP:] if token >= 0] for row in rows]
    assert all(row[:OVERLAP] == ([-1] * OVERLAP + text)[-OVERLAP:] for row in rows)
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    held: set[int] = set()
    for path, parts in zip(paths, chances.tolist(), strict=False):
        steps, above, reach = [], -1, 1.0
        for token in path:
            above = next(node for node, parent in enumerate(parents) if parent == above and tokens[node] == token)
            steps.append(above)
            reach *= parts[OVERLAP + len(steps) - 1] / CERTAIN
            assert abs(reach - tree.probabilities[above]) < 1e-3, "the chances of a path are those of its nodes"
        assert above not in parents, "a path ends at a leaf"
        assert min(set(range(len(parents))) - held) in steps, "each is there for the first node that others lack"
        held.update(steps)
    assert len(paths) == count or held == set(range(len(parents)))


@given(st.lists(texts, max_size=4), texts, st.integers(0, 4))
def test_passages_last_as_long_as_the_text_goes_on_like_one(
    first: list[list[int]], fresh: list[int], vocabulary: int
) -> None:
    passages = Passages(as_tokens([9]), rows=1, overlap=OVERLAP, width=WIDTH)
    assert passages.left == 0
    path = first[0] if first else []
    find_passages([(passages, None, (), path)], 0, vocabulary)
    known = path[: next((i for i, token in enumerate(path) if token >= vocabulary), len(path))][: WIDTH - OVERLAP]
    assert passages.left == len(known)
    for start in range(0, len(fresh), 2):
        passages.advance(as_tokens(fresh[start : start + 2]))
        said = fresh[: start + 2]
        assert passages.left == (len(known) - len(said) if known[: len(said)] == said else 0)


def test_a_passage_outlasts_the_steps_until_the_next_is_found() -> None:
    for count in (1, 7, 32):
        shape = shape_for(count)
        assert shape.ahead > shape.least == STEPS_BEHIND * (count + 1) + count
    found = find_passages([(Passages(np.array([6], np.int32), rows=2, overlap=2, width=5), None, (), [7])], 0)
    chances = [0, 0, -1, *[0] * 7]
    assert found.tolist() == [-1, 6, 7, -1, -1, *[-1] * 5, *chances], "a path begins behind the overlap"
