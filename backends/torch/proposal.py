"""What one request proposes each round, and what it learns from the outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from agentspec.backends.torch.drafters import Drafter
from agentspec.backends.torch.stats import Counters, count
from agentspec.governor import Governor
from agentspec.types import Draft, Speculation

FREE = 0.005  # drafting up to this share of a one-token step is not worth accounting for


@dataclass(frozen=True, slots=True)
class Proposal:
    """The draft nodes to verify, in parallel lists; `seconds` is what asking for them took."""

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    probabilities: Sequence[float] = ()
    sources: Sequence[int] = ()
    expected: float = 0.0
    seconds: float = 0.0
    asked: bool = False


NOTHING = Proposal()


class Proposer:
    """Asks one request's drafter for as much as the governor finds worth verifying, and reports back to both."""

    def __init__(self, drafter: Drafter | None, governor: Governor, counters: Counters, vocab_size: int) -> None:
        self._drafter = drafter
        self._governor = governor
        self._counters = counters
        self._vocab_size = vocab_size
        self._pace = governor.pace()
        self._drafted = 0
        self._accepted = 0
        self._steps = 0
        self._saved = 0.0

    def propose(self, context: Sequence[int], budget: int, *, base: int) -> Proposal:
        """At most `budget` nodes to verify along with `base` tokens behind `context`."""
        if self._drafter is None or budget <= 0 or not self._pace.ask():
            return NOTHING
        started = perf_counter()
        draft = self._drafter.propose(context, budget)
        if draft is None or len(draft) == 0:
            return Proposal(seconds=perf_counter() - started, asked=True)
        legal = usable(draft, self._vocab_size, budget)
        chosen = self._chosen(legal, base, len(context) - base)
        seconds = perf_counter() - started
        return replace(chosen, seconds=seconds, asked=True)

    def _chosen(self, legal: Proposal, base: int, rows: int) -> Proposal:
        governor, pace = self._governor, self._pace
        worth = governor.expectations(legal.probabilities, legal.parents, legal.sources, pace)
        nodes = governor.choose(worth, base=base, context=rows)
        return subtree(legal, nodes, sum(worth[node] for node in nodes))

    def learn(
        self, proposal: Proposal, path: Sequence[int], *, base: int, rows: int, emitted: int, seconds: float
    ) -> None:
        """One round is over: `path` was accepted, `emitted` tokens committed, its forward took `seconds`."""
        governor, hit = self._governor, set(path)
        accepted = [node in hit for node in range(len(proposal.tokens))]
        one = governor.cost.seconds(1, rows)
        extra = governor.cost.seconds(base + len(proposal.tokens), rows) - governor.cost.seconds(base, rows)
        saved = (emitted - 1) * one - extra
        governor.observe(proposal.probabilities, proposal.sources, accepted, base=base, context=rows, seconds=seconds)
        if proposal.asked:
            cost = max(0.0, proposal.seconds - FREE * one)
            self._pace.observe(proposal.expected, len(path), cost, saved)
        self._steps += 1
        self._drafted += len(proposal.tokens)
        self._accepted += len(path)
        self._saved += saved - proposal.seconds
        self._count(proposal, path)

    def _count(self, proposal: Proposal, path: Sequence[int]) -> None:
        self._counters.steps += 1
        count(self._counters.draft_sizes, len(proposal.tokens))
        for source in proposal.sources:
            count(self._counters.drafted, source)
        for node in path:
            count(self._counters.accepted, proposal.sources[node])

    @property
    def speculation(self) -> Speculation | None:
        """Totals so far; None where this request does not speculate."""
        if self._drafter is None:
            return None
        return Speculation(self._drafted, self._accepted, self._steps, self._saved)


def usable(draft: Draft, vocab_size: int, budget: int) -> Proposal:
    """The draft without ids the model does not have, without what hangs on them, and within `budget` nodes."""
    tokens, parents = draft.tokens.tolist(), draft.parents.tolist()
    keep: list[int] = []
    alive = [False] * len(tokens)
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if len(keep) < budget and 0 <= token < vocab_size and (parent < 0 or alive[parent]):
            alive[node] = True
            keep.append(node)
    whole = Proposal(tokens, parents, draft.probabilities.tolist(), draft.source.tolist())
    return whole if len(keep) == len(tokens) else subtree(whole, keep, 0.0)


def subtree(whole: Proposal, nodes: Sequence[int], expected: float) -> Proposal:
    """The part of `whole` made of `nodes` (ascending, closed under parents)."""
    place = {node: index for index, node in enumerate(nodes)}
    return Proposal(
        tokens=[whole.tokens[node] for node in nodes],
        parents=[place.get(whole.parents[node], -1) for node in nodes],
        probabilities=[whole.probabilities[node] for node in nodes],
        sources=[whole.sources[node] for node in nodes],
        expected=expected,
    )
