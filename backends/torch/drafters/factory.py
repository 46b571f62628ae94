"""Opens the configured drafters for each answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentspec.backends.settings import DrafterName
from agentspec.backends.torch.drafters.base import Drafter, StagedDrafter
from agentspec.backends.torch.drafters.cross_tokenizer import CrossTokenizerDrafter
from agentspec.backends.torch.drafters.draft_model import ModelDrafter, Room
from agentspec.backends.torch.drafters.gated import GatedDrafter
from agentspec.backends.torch.drafters.merged import MergedDrafter
from agentspec.backends.torch.drafters.ngram import NgramDrafter
from agentspec.backends.torch.drafters.prediction import PredictionDrafter
from agentspec.backends.torch.drafters.shared_noise import SharedNoiseSampler
from agentspec.backends.torch.drafters.suffix import DraftingRequest, SuffixDrafter
from agentspec.backends.torch.model.target import TargetModel
from agentspec.backends.torch.text.tokenizer import TokenizerAdapter
from agentspec.types import SamplingParams

TokenSeconds = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model. `tokenizers` are the target's and the draft model's if they differ, else None."""

    name: str
    model: TargetModel
    tokenizers: tuple[TokenizerAdapter, TokenizerAdapter] | None = None

    def drafter(
        self, noise: SharedNoiseSampler, token_seconds: TokenSeconds, room: Room = lambda: None
    ) -> StagedDrafter:
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
