"""Asks cheap drafters in every step, and a costly one when it promises more accepted tokens than they do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from agentspec.backends.torch.drafters.base import Drafter
from agentspec.backends.torch.drafters.forwards import Drafting, draft_alone, timed
from agentspec.backends.torch.drafters.merged import merge
from agentspec.backends.torch.model.device import is_device_error
from agentspec.telemetry.safe_errors import safe_message
from agentspec.types import Draft, path_length

logger = logging.getLogger(__name__)

START_GAIN = 2.0  # tokens that an untried model is assumed to gain
RATE = 0.15
LONGEST_WAIT = 64  # most rounds between two trials of a model that does not pay


class GatedDrafter(Drafter):
    """Asks `costly` when the cheap drafters expect fewer tokens than its recent gain, and merges its tree with theirs.

    The gain of a round is the number of accepted tokens from its draft less the tokens that the target would have
    generated in the time drafting took (`token_seconds(context)` each). While the gain is negative, `costly` is tried
    ever more rarely. If it raises an error, it is dropped: drafting is optional. The rule is SuffixDecoding's hybrid
    (Oliaro et al. 2025) with the drafting cost subtracted.
    """

    def __init__(self, cheap: Drafter, costly: Drafter, token_seconds: Callable[[int], float]) -> None:
        self._cheap, self._token_seconds = cheap, token_seconds
        self._costly: Drafter | None = costly
        self._gain = START_GAIN
        self._wait = self._waited = 0
        self._tried: tuple[int, Draft, float] | None = None  # context length, draft, drafting cost in tokens

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        return draft_alone(self.drafting(context, budget))

    def drafting(self, context: Sequence[int], budget: int) -> Drafting[Draft | None]:
        self.seconds_weighed = 0.0
        self._learn(context)
        offered = self._cheap.propose(context, budget)
        expected = 0.0 if offered is None else float(offered.probabilities.sum())
        if self._costly is None or not self._due(expected):
            return offered
        drafted = yield from self._ask(self._costly, context, budget)
        return merge((offered, drafted))

    def rest(self) -> None:
        self._cheap.rest()
        if self._costly is not None:
            self._costly.rest()

    def close(self) -> None:
        self._cheap.close()
        self._drop()

    def _due(self, expected: float) -> bool:
        """Whether to ask the costly drafter: its gain exceeds `expected`, or its next trial is due."""
        self._waited += 1
        return self._waited > self._wait and (self._gain > expected or self._wait > 0)

    def _ask(self, costly: Drafter, context: Sequence[int], budget: int) -> Drafting[Draft | None]:
        try:
            draft, self.seconds_weighed = yield from timed(costly.drafting(context, budget))
        except Exception as error:
            if is_device_error(error):
                raise
            logger.warning("going on without the draft model: %s", safe_message(error))
            self._drop()
            return None
        if draft is not None:  # None: the model still reads the prompt, a cost that occurs only once
            self._tried = len(context), draft, self.seconds_weighed / self._token_seconds(len(context))
        return draft

    def _learn(self, context: Sequence[int]) -> None:
        """Update the gain by how many tokens of the last trial's draft were accepted."""
        if self._tried is None:
            return
        (before, draft, cost), self._tried = self._tried, None
        net = path_length(draft.tokens.tolist(), draft.parents.tolist(), context[before:]) - cost
        self._gain += RATE * (net - self._gain)
        self._waited = 0
        self._wait = min(max(1, 2 * self._wait), LONGEST_WAIT) if self._gain < 0 and net < 0 else 0

    def _drop(self) -> None:
        costly, self._costly = self._costly, None
        if costly is not None:
            costly.close()
