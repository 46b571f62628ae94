"""Cheap drafters first, and the costly one where it promises more than they do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter

from agentspec.backends.torch.drafters.base import Drafter
from agentspec.backends.torch.drafters.merged import merge
from agentspec.telemetry.safe_errors import safe_message
from agentspec.types import Draft

logger = logging.getLogger(__name__)

START_GAIN = 2.0  # tokens: what an untried model is thought to bring
RATE = 0.15
LONGEST_WAIT = 64  # rounds between two trials of a model that does not pay


class GatedDrafter(Drafter):
    """Asks `costly` in rounds where the others expect less than it has lately brought, and lays its tree over theirs.

    What it brings is counted in tokens: those of its draft that came true, less those that the target would have made
    in the time drafting took (`step_seconds` a token). Below zero it is tried again ever more rarely. If it fails, it
    is dropped: drafting is optional. The rule is SuffixDecoding's hybrid (Oliaro et al. 2025) with the cost taken off.
    """

    def __init__(self, cheap: Drafter, costly: Drafter, step_seconds: Callable[[int], float]) -> None:
        self._cheap, self._step_seconds = cheap, step_seconds
        self._costly: Drafter | None = costly
        self._gain = START_GAIN
        self._wait = self._waited = 0
        self._tried: tuple[int, Draft, float] | None = None  # length of the context, draft, its cost in tokens

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        self.seconds_weighed = 0.0
        self._learn(context)
        offered = self._cheap.propose(context, budget)
        expected = 0.0 if offered is None else float(offered.probabilities.sum())
        if self._costly is None or not self._due(expected):
            return offered
        drafted = self._ask(self._costly, context, budget)
        drafts = [draft for draft in (offered, drafted) if draft is not None and len(draft)]
        return merge(drafts) if len(drafts) > 1 else next(iter(drafts), None)

    def close(self) -> None:
        self._cheap.close()
        self._drop()

    def _due(self, expected: float) -> bool:
        """Whether the costly drafter has brought more than `expected`, or is to be tried again."""
        self._waited += 1
        return self._waited > self._wait and (self._gain > expected or self._wait > 0)

    def _ask(self, costly: Drafter, context: Sequence[int], budget: int) -> Draft | None:
        started = perf_counter()
        try:
            draft = costly.propose(context, budget)
        except Exception as error:
            logger.warning("going on without the draft model: %s", safe_message(error))
            self._drop()
            return None
        self.seconds_weighed = perf_counter() - started
        if draft is not None:  # None is a model that still reads the prompt, which is done once
            self._tried = len(context), draft, self.seconds_weighed / self._step_seconds(len(context))
        return draft

    def _learn(self, context: Sequence[int]) -> None:
        """Count what of the last trial came true."""
        if self._tried is None:
            return
        (before, draft, cost), self._tried = self._tried, None
        net = followed(draft, context[before:]) - cost
        self._gain += RATE * (net - self._gain)
        self._waited = 0
        self._wait = min(max(1, 2 * self._wait), LONGEST_WAIT) if self._gain < 0 and net < 0 else 0

    def _drop(self) -> None:
        costly, self._costly = self._costly, None
        if costly is not None:
            costly.close()


def followed(draft: Draft, fresh: Sequence[int]) -> int:
    """How many of the committed tokens `fresh` lie on a path of `draft`."""
    children = {(int(p), int(t)): node for node, (p, t) in enumerate(zip(draft.parents, draft.tokens, strict=True))}
    node = -1
    for count, token in enumerate(fresh):
        child = children.get((node, token))
        if child is None:
            return count
        node = child
    return len(fresh)
