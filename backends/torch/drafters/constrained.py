"""Drafting under a grammar: drops tokens that the grammar forbids and adds tokens that it forces."""

from __future__ import annotations

from collections.abc import Sequence

from agentspec.backends.torch.drafters.base import Drafter, chain_draft, make_draft
from agentspec.backends.torch.drafters.forwards import Drafting, draft_alone
from agentspec.backends.torch.drafters.merged import merge
from agentspec.backends.torch.grammars.matcher import GrammarMatcher
from agentspec.types import Draft, Source

FORCED = 0.9  # how likely the model is to spell a forced text in the same tokens as the tokenizer


class ConstrainedDrafter(Drafter):
    """Removes from another drafter's trees the nodes that the grammar forbids, and adds the tokens that it forces."""

    def __init__(self, drafter: Drafter, constraint: GrammarMatcher) -> None:
        self._drafter = drafter
        self._constraint = constraint

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        return draft_alone(self.drafting(context, budget))

    def drafting(self, context: Sequence[int], budget: int) -> Drafting[Draft | None]:
        forced = self._constraint.forced()[:budget]
        draft = yield from self._drafter.drafting(context, budget)
        self.seconds_weighed = self._drafter.seconds_weighed
        spelled = chain_draft(forced, FORCED, Source.GRAMMAR) if forced else None
        return merge((spelled, None if draft is None else self._cut(draft)))

    def rest(self) -> None:
        self._drafter.rest()

    def close(self) -> None:
        self._drafter.close()

    def _cut(self, draft: Draft) -> Draft:
        nodes = self._constraint.admitted(draft.tokens.tolist(), draft.parents.tolist())
        if len(nodes) == len(draft):
            return draft
        place = {node: index for index, node in enumerate(nodes)}
        parents = [place.get(int(draft.parents[node]), -1) for node in nodes]
        return make_draft(
            draft.tokens[nodes],  # type: ignore[arg-type]
            parents,
            draft.probabilities[nodes],
            draft.match_length[nodes],  # type: ignore[arg-type]
            draft.source[nodes],  # type: ignore[arg-type]
        )
