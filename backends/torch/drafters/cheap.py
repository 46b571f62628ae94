"""The drafter that asks the token cache, and the factory of each answer's drafters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentspec.backends.torch.drafters.base import MIN_PROBABILITY, Drafter
from agentspec.backends.torch.drafters.combined import MergedDrafter, PredictionDrafter
from agentspec.types import Draft

if TYPE_CHECKING:
    from agentspec.backends.torch.drafters.draft_model import DraftModel, SharedNoiseSampler, TokenSeconds


CacheDraft = Callable[[int, float], Draft | None]  # of a budget and the least probability


class SuffixDrafter(Drafter):
    """Asks the token cache for a draft: `ask` of the open cache request, which already knows the context."""

    def __init__(self, ask: CacheDraft) -> None:
        self._ask = ask

    def propose(self, context: Sequence[int], budget: int) -> Draft | None:
        return self._ask(budget, MIN_PROBABILITY)


@dataclass(frozen=True, slots=True)
class DrafterFactory:
    """Opens each answer's drafters: those of `names`, where `model` stands for `draft_model` if there is one."""

    names: Sequence[str] = ("suffix", "prediction", "model")
    draft_model: DraftModel | None = None

    @property
    def slot_bytes(self) -> int:
        """The bytes that drafting needs for each of an answer's tokens."""
        return self.draft_model.model.slot_bytes() if self.draft_model is not None and "model" in self.names else 0

    def open(
        self,
        ask: CacheDraft,
        prediction: PredictionDrafter | None,
        noise: SharedNoiseSampler,
        token_seconds: TokenSeconds,
    ) -> Drafter:
        """One answer's drafter: it merges the trees of the cheap drafters and asks the draft model when that pays.

        `token_seconds(context)` is what a token takes without drafts, however many answers share a step.
        """
        found: list[Drafter] = []
        if "suffix" in self.names:
            found.append(SuffixDrafter(ask))
        if "prediction" in self.names and prediction is not None:
            found.append(prediction)
        cheap = found[0] if len(found) == 1 else MergedDrafter(found)
        if "model" not in self.names or self.draft_model is None:
            return cheap
        return self.draft_model.gated(cheap, noise, token_seconds)
