"""Proposes draft tokens for one request in each step, follows what of them is accepted, and learns from that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from traceback import clear_frames

import numpy as np

from agentspec.backends.torch.drafters.base import Drafter
from agentspec.backends.torch.engine.stats import Counters
from agentspec.backends.torch.model.device import is_device_error
from agentspec.speculation.governor import Governor
from agentspec.telemetry.safe_errors import error_location
from agentspec.types import DEFAULT_TENANT, Draft, Speculation

logger = logging.getLogger(__name__)

FREE = 0.005  # drafting time up to this share of a step is not charged


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft nodes in parallel lists; `acceptance[i]` is the calibrated probability that node i is accepted.

    `asked` says whether the drafter was called, `seconds` how long that took, and `weighed` how much of that time the
    drafter has already charged against its own gain.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    probabilities: Sequence[float] = ()
    sources: Sequence[int] = ()
    acceptance: Sequence[float] = ()
    seconds: float = 0.0
    weighed: float = 0.0
    asked: bool = False

    def __len__(self) -> int:
        return len(self.tokens)


NOTHING = Proposal()


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """Estimated seconds of a step: `plain` without drafts, `drafts` added by verifying drafts, and `token` per token
    in a step that decodes without drafts.
    """

    plain: float
    drafts: float
    token: float


class Speculator:
    """Calls one request's drafter and reports to the governor and the counters which draft tokens were accepted."""

    def __init__(
        self,
        drafter: Drafter | None,
        governor: Governor,
        counters: Counters,
        vocab_size: int,
        step: str | None = None,
        tenant: str = DEFAULT_TENANT,
    ) -> None:
        self._drafter = drafter
        self._governor = governor
        self._counters = counters
        self._vocab_size = vocab_size
        self._stats = governor.request_stats(step, tenant)
        self._steps = 0
        self._saved = 0.0
        self.drafts: list[tuple[int, int]] = []  # tokens of each draft, and those of them that were accepted
        self._failed = False

    def propose(self, context: Sequence[int], budget: int) -> Proposal:
        """Propose at most `budget` draft nodes after `context`, from which the governor chooses.

        A drafter that fails is not asked again for this answer, which goes on without drafts. Raises errors of the
        device only: after one nothing more can be computed.
        """
        if self._drafter is None or self._failed or budget <= 0 or not self._stats.ask():
            return NOTHING
        started = perf_counter()
        try:
            draft = self._drafter.propose(context, budget)
        except Exception as error:
            if is_device_error(error):
                raise
            self._give_up(error)
            return NOTHING
        legal = NOTHING if draft is None else usable(draft, self._vocab_size, budget)
        acceptance = self._governor.expectations(legal.probabilities, legal.parents, legal.sources, self._stats)
        seconds, weighed = perf_counter() - started, self._drafter.seconds_weighed
        return replace(legal, acceptance=acceptance, seconds=seconds, weighed=weighed, asked=True)

    def observe(self, proposal: Proposal, path: Sequence[int], cost: StepEstimate) -> None:
        """Learn from a finished step in which the nodes in `path` of the proposal were accepted."""
        hit = set(path)
        accepted = [node in hit for node in range(len(proposal))]
        self._governor.observe(proposal.probabilities, proposal.sources, accepted, self._stats)
        if proposal.asked:
            spent = max(0.0, proposal.seconds - proposal.weighed - FREE * cost.plain)
            self._stats.observe(sum(proposal.acceptance), len(path), spent, len(path) * cost.token)
        self._steps += 1
        if proposal:
            self.drafts.append((len(proposal), len(path)))
        self._saved += len(path) * cost.plain - cost.drafts - proposal.seconds
        counters = self._counters
        counters.steps += 1
        if len(proposal):
            counters.draft_lengths[len(path)] += 1
        counters.drafted.update(proposal.sources)
        counters.accepted.update(proposal.sources[node] for node in path)

    def _give_up(self, error: Exception) -> None:
        self._failed = True
        if self._drafter is not None:
            self._drafter.close()
        self._counters.draft_failures += 1
        logger.warning("an answer goes on without drafts: %s", error_location(error))
        clear_frames(error.__traceback__)  # they keep the tensors of a failed draft model alive

    @property
    def speculation(self) -> Speculation | None:
        """The request's totals so far; None if it does not speculate."""
        if self._drafter is None:
            return None
        drafted, accepted = sum(size for size, _ in self.drafts), sum(kept for _, kept in self.drafts)
        return Speculation(drafted, accepted, self._steps, self._saved)


def usable(draft: Draft, vocab_size: int, budget: int) -> Proposal:
    """Remove from a draft the token ids that the model does not have, their descendants, and the least likely nodes
    beyond `budget`.
    """
    tokens, parents = draft.tokens.tolist(), draft.parents.tolist()
    likeliest = set(np.argsort(-draft.probabilities, kind="stable")[:budget].tolist())
    keep: list[int] = []
    alive = [False] * len(tokens)
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if node in likeliest and 0 <= token < vocab_size and (parent < 0 or alive[parent]):
            alive[node] = True
            keep.append(node)
    whole = Proposal(tokens, parents, draft.probabilities.tolist(), draft.source.tolist())
    return whole if len(keep) == len(tokens) else subtree(whole, keep)


def subtree(whole: Proposal, nodes: Sequence[int]) -> Proposal:
    """The part of `whole` made of `nodes`, in their order; each node's parent must come before it in `nodes`."""
    place = {node: index for index, node in enumerate(nodes)}
    return replace(
        whole,
        tokens=[whole.tokens[node] for node in nodes],
        parents=[place.get(whole.parents[node], -1) for node in nodes],
        probabilities=[whole.probabilities[node] for node in nodes],
        sources=[whole.sources[node] for node in nodes],
        acceptance=[whole.acceptance[node] for node in nodes] if whole.acceptance else (),
    )


def depth_first(whole: Proposal, nodes: Sequence[int]) -> list[int]:
    """`nodes` (closed under parents) in depth-first order, the likeliest child first. If the likeliest path is
    accepted, its KV slots are already in place and need not be moved.
    """
    children: dict[int, list[int]] = {}
    for node in nodes:
        children.setdefault(whole.parents[node], []).append(node)
    order: list[int] = []
    waiting = [-1]
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting += sorted(children.get(node, ()), key=lambda child: (whole.acceptance[child], -child))
    return order[1:]


def accept_path(
    tokens: Sequence[int],
    parents: Sequence[int],
    choose: Callable[[int], int],
    emit: Callable[[int, int], bool],
) -> list[int]:
    """Follow a verified draft tree from its root and return the accepted nodes, root to leaf.

    `choose(row)` draws the next token from the target's processed distribution after that row: row 0 follows the
    context, row i + 1 follows node i. `emit(token, row)` commits the token and returns whether the text ends with it;
    nothing is drawn after that. Every emitted token is the target's own draw; the draft only decides whether the row
    for the next draw has already been computed. This is exact for any tree (SpecInfer, Miao et al. 2024, section 4.3,
    with draws coupled by position instead of residuals).
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
        if emit(token, row) or child is None:
            return path
        path.append(child)
        node = child
