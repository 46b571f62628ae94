"""Log-probabilities of the raw distribution, before any processing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from agentspec.backends.torch.model import TargetModel
from agentspec.types import TokenLogprob

CHUNK = 64  # prompt tokens scored at once: their logits are all kept, and other streams wait meanwhile


def token_logprob(logits: Tensor, token: int, top: int, spell: Callable[[int], str]) -> TokenLogprob:
    """`token`'s natural-log probability under the float32 row `logits` [vocab], and those of the `top` best tokens."""
    scores = logits.log_softmax(-1)
    rank = int((logits > logits[token]).sum()) + 1
    best = scores.topk(min(top, len(scores))) if top else None
    pairs = [] if best is None else zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenLogprob(
        token_id=token,
        text=spell(token),
        logprob=float(scores[token]),
        rank=rank,
        top=tuple(
            TokenLogprob(int(other), spell(int(other)), value, rank=place)
            for place, (other, value) in enumerate(pairs, 1)
        ),
    )


class PromptScorer:
    """Scores a prompt's tokens, some of them each `step`; `entries` has one for every token but the first.

    It computes rows of its own: scoring needs the logits of every position, which reused rows no longer have.
    """

    def __init__(self, target: TargetModel, prompt: Sequence[int], top: int, spell: Callable[[int], str]) -> None:
        self.entries: list[TokenLogprob] = []
        self._target = target
        self._prompt = prompt
        self._top = top
        self._spell = spell
        self._rows = target.new_rows(len(prompt))
        self._chunk = CHUNK if target.rewindable else 1

    @property
    def done(self) -> bool:
        return len(self.entries) == len(self._prompt) - 1

    def finish(self) -> tuple[TokenLogprob, ...]:
        """All entries, whatever steps are left done now."""
        while not self.done:
            self.step()
        return tuple(self.entries)

    @torch.inference_mode()
    def step(self) -> None:
        """Read the next tokens, each as a node below the one before, since a forward returns the logits of nodes."""
        at = len(self.entries)
        first, *rest = self._prompt[at : min(at + self._chunk, len(self._prompt) - 1)]
        logits = self._target.forward(self._rows, [first], rest, range(-1, len(rest) - 1))
        self._rows.commit(1, range(len(rest)))
        for row, token in zip(logits, self._prompt[at + 1 :], strict=False):
            self.entries.append(token_logprob(row, token, self._top, self._spell))
