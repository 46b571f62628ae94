"""Drafts from the answer that the client predicts (`prediction`), and realigns with it after every divergence."""

from __future__ import annotations

from collections.abc import Sequence

from agentspec.backends.torch.drafters.base import Drafter, chain_draft
from agentspec.text import PredictedText
from agentspec.types import Draft, Source


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
