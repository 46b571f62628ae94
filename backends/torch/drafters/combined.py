"""Drafters that a request adds (its prediction, its grammar), and the union of several drafters' trees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentspec.backends.torch.drafters.base import Drafter, chain_draft, make_draft
from agentspec.backends.torch.grammars.grammar import GrammarMatcher
from agentspec.prediction import PredictedText
from agentspec.types import Draft, Source


class MergedDrafter(Drafter):
    """Merges several drafters' trees: a path that several propose is in it once, with its highest probability."""

    def __init__(self, *drafters: Drafter) -> None:
        self._drafters = drafters

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        return merge(drafter.propose(context, budget) for drafter in self._drafters)


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
        slots: list[int] = []
        columns = draft.tokens, draft.parents, draft.probabilities, draft.match_length, draft.source
        for token, parent, probability, *rest in zip(*(column.tolist() for column in columns), strict=True):
            above = slots[parent] if parent >= 0 else -1
            node = nodes.setdefault((above, token), len(nodes))
            slots.append(node)
            row = [token, above, probability, *rest]
            if node == len(rows):
                rows.append(row)
            elif probability > rows[node][2]:
                rows[node] = row
    return make_draft(*zip(*rows, strict=True))


class PredictionDrafter(Drafter):
    """Drafts from the answer that the client predicts, for as long as the real answer follows it."""

    def __init__(self, prediction: Sequence[int], prompt_length: int) -> None:
        self._text = PredictedText(prediction)
        self._seen = prompt_length

    @property
    def accepted(self) -> int:
        """The number of tokens of the prediction that appeared in the answer."""
        return self._text.accepted

    @property
    def rejected(self) -> int:
        """The number of tokens of the prediction that did not appear in the answer."""
        return self._text.rejected

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        self.follow(context)
        tokens = self._text.ahead(budget)
        return chain_draft(tokens, self._text.confidence, Source.PREDICTION) if tokens else None

    def follow(self, context: Sequence[int]) -> None:
        """Follow the tokens committed since the last call and count those that were predicted."""
        self._text.follow(context[self._seen :])
        self._seen = len(context)


FORCED = 0.9  # how likely the model is to spell a forced text in the same tokens as the tokenizer


class ConstrainedDrafter(Drafter):
    """Removes from another drafter's trees the nodes that the grammar forbids, and adds the tokens that it forces."""

    def __init__(self, drafter: Drafter, constraint: GrammarMatcher) -> None:
        self._drafter = drafter
        self._constraint = constraint

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        forced = self._constraint.forced()[:budget]
        draft = self._drafter.propose(context, budget)
        self.seconds_weighed = self._drafter.seconds_weighed
        spelled = chain_draft(forced, FORCED, Source.GRAMMAR) if forced else None
        return merge((spelled, None if draft is None else self._cut(draft)))

    def close(self) -> None:
        self._drafter.close()

    def _cut(self, draft: Draft) -> Draft:
        above = draft.parents.tolist()
        nodes = self._constraint.admitted(draft.tokens.tolist(), above)
        if len(nodes) == len(draft):
            return draft
        place = {node: index for index, node in enumerate(nodes)}
        parents = [place.get(above[node], -1) for node in nodes]
        return make_draft(
            draft.tokens[nodes],  # type: ignore[arg-type]
            parents,
            draft.probabilities[nodes],
            draft.match_length[nodes],  # type: ignore[arg-type]
            draft.source[nodes],  # type: ignore[arg-type]
        )
