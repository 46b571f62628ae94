"""Passages: the likeliest continuations of a request's known text, as fixed-size rows for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentspec.cache.tokens import Tokens
from agentspec.types import Draft

NO_TOKEN = -1
_ROWS, _OVERLAP = 4, 16
STEPS_BEHIND = 2
"""Steps whose tokens the host does not know yet when a passage is used, at most: with asynchronous scheduling one is
computed while the next is being prepared."""

Rows = NDArray[np.int32]


class PassageShape(NamedTuple):
    """The size of a request's passages: `rows` rows of `width` tokens, the first `overlap` of them known text.

    The overlap lets the device find the place of a continuation by the tokens before it.
    """

    rows: int
    overlap: int
    width: int

    @property
    def ahead(self) -> int:
        """Tokens of a continuation."""
        return self.width - self.overlap

    @property
    def nodes(self) -> int:
        """Nodes of the draft tree whose paths are the passages."""
        return 2 * self.ahead


def shape_for(draft_tokens: int) -> PassageShape:
    """Passages long enough for a chain of `draft_tokens` after all steps that the host does not know were accepted."""
    return PassageShape(_ROWS, _OVERLAP, _OVERLAP + STEPS_BEHIND * (draft_tokens + 1) + draft_tokens)


def passages(trees: Sequence[Sequence[int]], context: Tokens, shape: PassageShape) -> Rows:
    """The continuations of `context`, the likeliest first, as an int32 array (rows, width), filled up with -1."""
    rows = np.full((shape.rows, shape.width), NO_TOKEN, dtype=np.int32)
    known = context[-shape.overlap :]
    for row, continuation in zip(rows, trees, strict=False):
        text = np.concatenate((known, np.array(continuation[: shape.ahead], dtype=np.int32)))
        row[: len(text)] = text
    return rows


def likeliest_paths(tree: Draft, count: int) -> list[list[int]]:
    """At most `count` paths of a draft tree, from the root to a leaf, that between them hold its likeliest nodes.

    Each path begins with the likeliest node that no path holds yet, after that node's ancestors, and goes on to the
    likeliest child. A tree lists its nodes by probability within each level, so that a first child is the likeliest.
    """
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    first_child: dict[int, int] = {}
    for node, parent in enumerate(parents):
        first_child.setdefault(parent, node)
    held: set[int] = set()
    found: list[list[int]] = []
    for node in range(len(tokens)):
        if len(found) == count:
            break
        if node not in held:
            path = [*_ancestors(node, parents), *_descendants(node, first_child)]
            held.update(path)
            found.append([tokens[step] for step in path])
    return found


def _ancestors(node: int, parents: Sequence[int]) -> list[int]:
    """The nodes above `node`, from the root down."""
    above: list[int] = []
    while (node := parents[node]) >= 0:
        above.append(node)
    return above[::-1]


def _descendants(node: int, first_child: dict[int, int]) -> list[int]:
    """`node`, its first child, that child's first child and so on."""
    below = [node]
    while (child := first_child.get(below[-1])) is not None:
        below.append(child)
    return below
