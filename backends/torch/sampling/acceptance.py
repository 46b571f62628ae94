"""Decides which path of a draft is accepted: by the rule that makes speculation exact, or by a lossy one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class AcceptancePolicy(Protocol):
    """A lossy rule: accepts drafted tokens that are not the target's own draws. Without one acceptance is exact."""

    def choose(self, row: int, nodes: Sequence[int]) -> int | None:
        """One of the draft's `nodes`, all of which follow `row`, to go on with; None for the target's own draw."""


def accept_path(
    tokens: Sequence[int],
    parents: Sequence[int],
    choose: Callable[[int], int],
    emit: Callable[[int, int], bool],
    policy: AcceptancePolicy | None = None,
) -> list[int]:
    """Follow a verified draft tree from its root and return the accepted nodes, root to leaf.

    `choose(row)` draws the next token from the target's processed distribution after that row: row 0 follows the
    context, row i + 1 follows node i. `emit(token, row)` commits the token and returns whether the text ends with it;
    nothing is drawn after that. Without a `policy` every emitted token is the target's own draw; the draft only decides
    whether the row for the next draw has already been computed. This is exact for any tree (SpecInfer, Miao et al.
    2024, section 4.3, with draws coupled by position instead of residuals).
    """
    children: dict[int, dict[int, int]] = {}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        children.setdefault(parent, {}).setdefault(token, node)
    path: list[int] = []
    node = -1
    while True:
        row, drafted = node + 1, children.get(node, {})
        token = choose(row)
        # A drafted token is accepted if it is the target's own draw: only then do its logits belong to this text.
        child = drafted.get(token)
        if child is None and policy is not None and drafted:
            child = policy.choose(row, list(drafted.values()))
            token = token if child is None else tokens[child]
        if emit(token, row) or child is None:
            return path
        path.append(child)
        node = child
