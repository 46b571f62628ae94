"""Decides which path of a draft is accepted: the rule that makes speculation exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def accept_path(
    tokens: Sequence[int], parents: Sequence[int], choose: Callable[[int], int], emit: Callable[[int, int], bool]
) -> list[int]:
    """Follow a verified draft tree from its root and return the accepted nodes, root to leaf.

    `choose(row)` draws the next token from the target's processed distribution after that row: row 0 follows the
    context, row i + 1 follows node i. `emit(token, row)` commits the token and returns whether the text ends with it;
    nothing is drawn after that. Every emitted token is the target's own draw; the draft only decides whether the row
    for the next draw has already been computed. This is exact for any tree (SpecInfer, Miao et al. 2024, section 4.3,
    with draws coupled by position instead of residuals).
    """
    children: dict[tuple[int, int], int] = {}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        children.setdefault((parent, token), node)
    path: list[int] = []
    node = -1
    while True:
        token = choose(node + 1)
        if emit(token, node + 1):
            return path
        # A drafted token is accepted if it is the target's own draw: only then do its logits belong to this text.
        child = children.get((node, token))
        if child is None:
            return path
        path.append(child)
        node = child
