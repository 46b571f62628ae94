"""Merges several drafters' trees into one."""

from __future__ import annotations

from collections.abc import Sequence

from agentspec.backends.torch.drafters.base import Drafter, make_draft
from agentspec.types import Draft


class MergedDrafter(Drafter):
    """Merges several drafters' trees: a path that several propose is kept once, with its highest probability."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        drafts = [draft for drafter in self._drafters if (draft := drafter.propose(context, budget)) is not None]
        drafts = [draft for draft in drafts if len(draft)]
        return merge(drafts) if len(drafts) > 1 else next(iter(drafts), None)

    def rest(self) -> None:
        for drafter in self._drafters:
            drafter.rest()

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()


def merge(drafts: Sequence[Draft]) -> Draft:
    """One tree with every path of `drafts`. A node in several drafts takes its values from the one that gives it the
    highest probability.
    """
    nodes: dict[tuple[int, int], int] = {}
    rows: list[list[float]] = []
    for draft in drafts:
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
    columns = list(zip(*rows, strict=True))
    return make_draft(columns[0], columns[1], columns[2], columns[3], columns[4])
