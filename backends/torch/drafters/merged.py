"""Merges several drafters' trees into one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentspec.backends.torch.drafters.base import Drafter, make_draft
from agentspec.types import Draft


class MergedDrafter(Drafter):
    """Merges several drafters' trees: a path that several propose is kept once, with its highest probability."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        return merge(drafter.propose(context, budget) for drafter in self._drafters)

    def ahead(self, path: Sequence[int], budget: int) -> Sequence[int]:
        return max((drafter.ahead(path, budget) for drafter in self._drafters), key=len, default=())

    def rest(self) -> None:
        for drafter in self._drafters:
            drafter.rest()

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()


def merge(drafts: Iterable[Draft | None]) -> Draft | None:
    """One tree with every path of `drafts`; None where no draft has any. A node in several drafts takes its values from
    the one that gives it the highest probability.
    """
    grown = [draft for draft in drafts if draft is not None and len(draft)]
    if len(grown) < 2:
        return next(iter(grown), None)
    nodes: dict[tuple[int, int], int] = {}
    rows: list[list[float]] = []
    for draft in grown:
        place: list[int] = []
        for i in range(len(draft)):
            parent = int(draft.parents[i])
            above = place[parent] if parent >= 0 else -1
            token, probability = int(draft.tokens[i]), float(draft.probabilities[i])
            node = nodes.setdefault((above, token), len(nodes))
            place.append(node)
            row = [token, above, probability, int(draft.match_length[i]), int(draft.source[i])]
            if node == len(rows):
                rows.append(row)
            elif probability > rows[node][2]:
                rows[node] = row
    return make_draft(*zip(*rows, strict=True))
