"""Log-probabilities of tokens under the model's raw distribution, before penalties, temperature or filters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from agentspec.backends.torch.model.device import to_device
from agentspec.backends.torch.model.kv_cache import SequenceCache
from agentspec.backends.torch.model.target import TargetModel
from agentspec.types import TokenLogprob

MISSING = 256  # tokens read again in one step
CHUNK = 64  # prompt tokens scored in one forward: all their logits are kept, and other requests wait for it


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int, spell: Callable[[int], str]) -> list[TokenLogprob]:
    """The natural-log probability of each token under its own float32 row of `logits` [tokens, vocab], and those of
    the `top` best tokens of that row. The host waits for the device once.
    """
    reals, integers = _measured(logits, tokens, min(top, logits.shape[-1]))
    return [_entry(*measured, spell) for measured in zip(tokens, reals, integers, strict=True)]


def _measured(logits: Tensor, tokens: Sequence[int], top: int) -> tuple[list[list[float]], list[list[int]]]:
    """For each row, the log-probabilities of the token and of the best tokens, then the token's rank and the best ids.

    The log-probabilities are transferred as the integers of their bits, so that one tensor carries everything.
    """
    scores = logits.log_softmax(-1)
    chosen = to_device(torch.tensor(tokens), logits.device)[:, None]
    rank = (logits > logits.gather(-1, chosen)).sum(-1, keepdim=True) + 1
    best = scores.topk(top)
    reals = torch.cat([scores.gather(-1, chosen), best.values], dim=-1)
    integers = torch.cat([rank, best.indices], dim=-1).int()
    found = torch.cat([reals.view(torch.int32), integers], dim=-1).cpu().numpy()
    return found[:, : 1 + top].view(np.float32).tolist(), found[:, 1 + top :].tolist()


def _entry(token: int, reals: list[float], integers: list[int], spell: Callable[[int], str]) -> TokenLogprob:
    (own, *values), (rank, *ids) = reals, integers
    best = enumerate(zip(ids, values, strict=True), 1)
    top = tuple(TokenLogprob(other, spell(other), value, rank=place) for place, (other, value) in best)
    return TokenLogprob(token, spell(token), own, rank=rank, top=top)


class PromptScorer:
    """Scores a prompt's tokens, a chunk in each `step`; `entries` gets one entry for every token but the first.

    It needs the logits of every position, which reused slots do not have.
    """

    def __init__(self, target: TargetModel, prompt: Sequence[int], top: int, spell: Callable[[int], str]) -> None:
        self.entries: list[TokenLogprob] = []
        self._target = target
        self._prompt = prompt
        self._top = top
        self._spell = spell

    @property
    def done(self) -> bool:
        return len(self.entries) == len(self._prompt) - 1

    @torch.inference_mode()
    def step(self, cache: SequenceCache) -> None:
        """Score the next tokens, whose slots follow those of the tokens scored before in `cache`. Slots missing there
        are computed first, in steps of their own. The tokens are read as a chain of draft nodes, since a forward
        returns logits for nodes.
        """
        at = len(self.entries)
        if cache.length > at:
            cache.truncate(at)
        if cache.length < at:
            self._target.prefill(cache, self._prompt[cache.length : min(at, cache.length + MISSING)])
            return
        first, *rest = self._prompt[at : min(at + CHUNK, len(self._prompt) - 1)]
        logits = self._target.forward(cache, [first], rest, range(-1, len(rest) - 1))
        cache.commit(1, range(len(rest)))
        scored = self._prompt[at + 1 : at + 1 + len(logits)]
        self.entries += token_logprobs(logits, scored, self._top, self._spell)
