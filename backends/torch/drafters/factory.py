"""Opens the configured drafters for each answer: cheap ones in every step, and a costly one where that gains tokens."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentspec.backends.settings import DrafterName
from agentspec.backends.torch.drafters.base import (
    Drafter,
    Drafting,
    draft_alone,
    timed,
)
from agentspec.backends.torch.drafters.cheap import (
    DraftingRequest,
    MergedDrafter,
    NgramDrafter,
    PredictionDrafter,
    SuffixDrafter,
    merge,
)
from agentspec.backends.torch.drafters.draft_model import CrossTokenizerDrafter, ModelDrafter, Room, SharedNoiseSampler
from agentspec.backends.torch.model.device import is_device_error
from agentspec.backends.torch.model.target import TargetModel
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.telemetry.safe_errors import safe_message
from agentspec.types import Draft, SamplingParams, path_length

logger = logging.getLogger(__name__)

START_GAIN = 2.0  # tokens that an untried model is assumed to gain
RATE = 0.15
LONGEST_WAIT = 64  # most rounds between two trials of a model that does not pay
EXPECTED = (0.5, 2.0, 6.0)  # tokens that the cheap drafters expect: what a model gains is learned apart between any two


@dataclass(slots=True)
class Gate:
    """Whether to ask a costly drafter. While its recent `gain` is negative, it is tried ever more rarely."""

    gain: float = START_GAIN
    wait: int = 0
    waited: int = 0

    def due(self) -> bool:
        self.waited += 1
        return self.waited > self.wait

    def learn(self, gained: float) -> None:
        self.gain += RATE * (gained - self.gain)
        self.waited = 0
        self.wait = min(max(1, 2 * self.wait), LONGEST_WAIT) if self.gain < 0 and gained < 0 else 0


@dataclass(frozen=True, slots=True)
class Trial:
    """The drafts of one round without and with the costly drafter, and what that cost, in tokens."""

    gate: Gate
    length: int  # of the context
    offered: Draft | None
    merged: Draft
    cost: float


class GatedDrafter(Drafter):
    """Asks `costly` too, where that gains tokens, and merges its tree with that of the cheap drafters.

    The gain of a round is the number of accepted tokens of the merged tree less those of the cheap drafters' own, and
    less the tokens that the target would have generated in the time drafting took (`token_seconds(context)` each). If
    `costly` raises an error, it is dropped: drafting is optional. Like SuffixDecoding's hybrid (Oliaro et al. 2025) it
    decides by what the cheap drafters expect, but what follows from that is learned.
    """

    def __init__(self, cheap: Drafter, costly: Drafter, token_seconds: Callable[[int], float]) -> None:
        self._cheap, self._token_seconds = cheap, token_seconds
        self._costly: Drafter | None = costly
        self._gates = [Gate() for _ in range(len(EXPECTED) + 1)]
        self._trial: Trial | None = None

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        return draft_alone(self.drafting(context, budget))

    def drafting(self, context: Sequence[int], budget: int) -> Drafting[Draft | None]:
        self.seconds_weighed = 0.0
        self._learn(context)
        offered = self._cheap.propose(context, budget)
        gate = self._gates[bisect_right(EXPECTED, 0.0 if offered is None else float(offered.probabilities.sum()))]
        if self._costly is None or not gate.due():
            return offered
        drafted = yield from self._ask(self._costly, context, budget)
        merged = merge((offered, drafted))
        if merged is not None and drafted is not None:  # None: the model still reads the prompt, which occurs only once
            cost = self.seconds_weighed / self._token_seconds(len(context))
            self._trial = Trial(gate, len(context), offered, merged, cost)
        return merged

    def rest(self) -> None:
        self._cheap.rest()
        if self._costly is not None:
            self._costly.rest()

    def close(self) -> None:
        self._cheap.close()
        self._drop()

    def _ask(self, costly: Drafter, context: Sequence[int], budget: int) -> Drafting[Draft | None]:
        try:
            draft, self.seconds_weighed = yield from timed(costly.drafting(context, budget))
        except Exception as error:
            if is_device_error(error):
                raise
            logger.warning("going on without the draft model: %s", safe_message(error))
            self._drop()
            return None
        return draft

    def _learn(self, context: Sequence[int]) -> None:
        """Update the gate by how many more tokens of the last trial's draft were accepted."""
        if self._trial is None:
            return
        trial, self._trial = self._trial, None
        output = context[trial.length :]
        trial.gate.learn(_accepted(trial.merged, output) - _accepted(trial.offered, output) - trial.cost)

    def _drop(self) -> None:
        costly, self._costly = self._costly, None
        if costly is not None:
            costly.close()


def _accepted(draft: Draft | None, output: Sequence[int]) -> int:
    return 0 if draft is None else path_length(draft.tokens.tolist(), draft.parents.tolist(), output)


TokenSeconds = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model. `tokenizers` are the target's and the draft model's if they differ, else None."""

    name: str
    model: TargetModel
    tokenizers: tuple[TokenizerAdapter, TokenizerAdapter] | None = None

    def drafter(self, noise: SharedNoiseSampler, token_seconds: TokenSeconds, room: Room = lambda: None) -> Drafter:
        """A drafter for one answer. It draws with the answer's `noise`, or greedily if tokens must be translated.
        `room()` is the most slots that it may keep.
        """

        def least(seconds: float, context: int) -> float:
            return seconds / token_seconds(context)

        if self.tokenizers is None:
            return ModelDrafter(self.model, noise, least, room=room)
        greedy = SharedNoiseSampler(SamplingParams(temperature=0), 0)
        return CrossTokenizerDrafter(ModelDrafter(self.model, greedy, least, width=1, room=room), *self.tokenizers)


@dataclass(frozen=True, slots=True)
class DrafterFactory:
    """The names of one engine's drafters, and the draft model that the name `model` stands for."""

    names: Sequence[DrafterName] = ("suffix", "prediction")
    draft_model: DraftModel | None = None

    @property
    def slot_bytes(self) -> int:
        """The bytes that drafting needs for each of an answer's tokens."""
        return self.draft_model.model.slot_bytes() if self.draft_model is not None and "model" in self.names else 0

    def open(
        self,
        session: DraftingRequest,
        prediction: PredictionDrafter | None,
        noise: SharedNoiseSampler,
        token_seconds: TokenSeconds,
        room: Room = lambda: None,
    ) -> Drafter:
        """One answer's drafter: it merges the trees of the cheap drafters and asks the draft model when that pays.

        `token_seconds(context)` is what a token takes without drafts, however many answers share a step.
        """
        found: list[Drafter] = []
        if "suffix" in self.names:
            found.append(SuffixDrafter(session))
        if "prediction" in self.names and prediction is not None:
            found.append(prediction)
        if "ngram" in self.names:
            found.append(NgramDrafter())
        cheap = MergedDrafter(found)
        if "model" not in self.names or self.draft_model is None:
            return cheap
        return GatedDrafter(cheap, self.draft_model.drafter(noise, token_seconds, room), token_seconds)
