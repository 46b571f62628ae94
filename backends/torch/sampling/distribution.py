"""The distribution of a draw: bias, penalties, filters, noise that depends only on seed, position and token, and the
log-probabilities that are reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from agentspec.backends.torch.model.device import to_device
from agentspec.types import SamplingParams, TokenLogprob

_WORD: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
_BELOW_ONE: Final = 1 - 2.0**-24  # the largest float32 below 1


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _mixed(word: int) -> int:
    """The splitmix64 finaliser (Steele, Lea, Flood 2014) of one 64-bit word."""
    word &= _WORD
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return word ^ (word >> 31)


def position_key(seed: int, choice: int, position: int) -> int:
    """The 64-bit noise key of one position of one answer, which `seed` and `choice` identify."""
    return _mixed(_mixed(_mixed(seed + _GOLDEN) ^ choice) + _GOLDEN * (position + 1))


def gumbel_noise(key: int | Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise in float32 for each of `token_ids` (int64): entry i is a pure function of (key, id i).

    For a column of keys, as signed words, the result has a row of noise for each key.

    splitmix64's output function at counter `id` gives 32 uniform bits v; -log1p(-v) is then a standard exponential,
    accurate where v is small, which is where the largest noise comes from, and its negative log is Gumbel.
    """
    z = token_ids * signed(_GOLDEN) + (signed(key) if isinstance(key, int) else key)
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * signed(_MIX_1)
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * signed(_MIX_2)
    bits = ((z ^ ((z >> 31) & ((1 << 33) - 1))) >> 32) & 0xFFFFFFFF
    return gumbel_of(bits)


def gumbel_of(bits: Tensor) -> Tensor:
    """Standard Gumbel noise in float32 for uniform 32-bit integers; finite for all of them."""
    # The largest 128 integers round to 1, whose noise would be -inf: as if the token were forbidden.
    uniform = ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=_BELOW_ONE)
    return -torch.log(-torch.log1p(-uniform))


class Penalties:
    """Logit bias and penalties of one answer: repetition over its prompt and answer, frequency and presence over the
    answer, whose tokens are passed to `observe`.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, prompt: Sequence[int], device: torch.device) -> None:
        self._params, self._bias = params, torch.zeros(vocab_size)
        self._scales = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0, 0, 1)
        for token, value in params.logit_bias.items():
            self._bias[token] = value
        self._bias = to_device(self._bias, device)
        self._counts = torch.zeros(vocab_size, device=device)
        self._prompted = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._prompted.index_fill_(0, to_device(torch.tensor(list(prompt), dtype=torch.long), device), True)

    def observe(self, token: int) -> None:
        self._counts[token] += 1

    def apply(self, rows: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """The scores of `rows` [rows, vocab], each of which follows the answer and then its path."""
        rows = rows + self._bias
        if not self._scales:
            return rows
        scale, counts = self._params.repetition_penalty, self._counts_along(paths)
        seen = self._prompted | (counts > 0)
        rows = torch.where(seen, torch.where(rows > 0, rows / scale, rows * scale), rows)
        rows = rows - self._params.frequency_penalty * counts
        return rows - self._params.presence_penalty * (counts > 0)

    def _counts_along(self, paths: Sequence[Sequence[int]]) -> Tensor:
        """How often each token occurs in the answer followed by each path: [paths, vocab], or [vocab] if all paths are
        empty.
        """
        size = len(self._counts)
        places = [row * size + token for row, path in enumerate(paths) for token in path]
        if not places:
            return self._counts
        counts = self._counts.repeat(len(paths))
        where = to_device(torch.tensor(places), counts.device)
        return counts.scatter_add_(0, where, torch.ones_like(where, dtype=counts.dtype)).view(-1, size)


NUCLEUS_HEAD: Final = 1024  # candidates sorted first; whole rows are sorted only if these are too few


def has_top_k_top_p(params: SamplingParams, vocab_size: int) -> bool:
    """Whether `apply_top_k_top_p` may filter out any token."""
    return params.min_p > 0 or 0 < params.top_k < vocab_size or params.top_p < 1


def apply_top_k_top_p(scores: Tensor, params: SamplingParams, *, may_sync: bool) -> Tensor:
    """`scores` [rows, vocab] with the filtered tokens at minus infinity; equal scores at a boundary all stay.

    With `may_sync` the host may wait for the device, which avoids sorting whole rows when a few tokens are enough.
    """
    if params.min_p > 0:
        scores = _at_least(scores, scores.amax(-1, keepdim=True) + math.log(params.min_p))
    if 0 < params.top_k < scores.shape[-1]:
        best = scores.topk(params.top_k).values
        nucleus = params.top_p < 1
        return _at_least(scores, _nucleus_bound(best, _total(scores, best), params.top_p) if nucleus else best[:, -1:])
    if params.top_p < 1:
        total = scores.logsumexp(-1, keepdim=True)
        return _at_least(scores, _nucleus_bound(_best(scores, total, params.top_p, may_sync), total, params.top_p))
    return scores


def _at_least(scores: Tensor, bound: Tensor) -> Tensor:
    return scores.masked_fill(scores < bound, -math.inf)


def _total(scores: Tensor, best: Tensor) -> Tensor:
    """The log of the total weight of the `best` scores and of all scores equal to the last of them: [rows, 1]."""
    last = best[:, -1:]
    tied = (scores >= last).sum(-1, keepdim=True) - best.shape[-1]
    return best.logsumexp(-1, keepdim=True).logaddexp(last + tied.log())


def _best(scores: Tensor, total: Tensor, top_p: float, may_sync: bool) -> Tensor:
    """The best scores of each row in descending order, at least as many as the nucleus holds."""
    if may_sync and scores.shape[-1] > NUCLEUS_HEAD:
        head = scores.topk(NUCLEUS_HEAD).values
        if bool((_reached(head, total)[:, -1] >= top_p).all()):
            return head
    return scores.sort(-1, descending=True).values


def _nucleus_bound(best: Tensor, total: Tensor, top_p: float) -> Tensor:
    """The lowest score in the smallest set of best tokens whose probability reaches `top_p`: [rows, 1]."""
    inside = (_reached(best, total) < top_p).sum(-1, keepdim=True)
    return best.gather(-1, inside.clamp(max=best.shape[-1] - 1))


def _reached(best: Tensor, total: Tensor) -> Tensor:
    """The cumulative probability of the best scores, up to and including each."""
    return (best - total).exp().cumsum(-1)


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], top: int, spell: Callable[[int], str]
) -> tuple[TokenLogprob, ...]:
    """The natural-log probability of each token under its own float32 row of the model's raw `logits` [tokens, vocab],
    and those of the `top` best tokens of that row. The host waits for the device once: the log-probabilities are
    transferred as the integers of their bits, so that one tensor carries everything.
    """
    scores = logits.log_softmax(-1)
    chosen = to_device(torch.tensor(tokens), logits.device)[:, None]
    best = scores.topk(min(top, logits.shape[-1]))
    reals = torch.cat([scores.gather(-1, chosen), best.values], dim=-1)
    found = torch.cat([reals.view(torch.int32), best.indices.int()], dim=-1).cpu().numpy()
    entries = []
    for token, row in zip(tokens, found, strict=True):
        own, *values = row[: reals.shape[-1]].view(np.float32).tolist()
        ids = row[reals.shape[-1] :].tolist()
        others = tuple(TokenLogprob(other, spell(other), value) for other, value in zip(ids, values, strict=True))
        entries.append(TokenLogprob(token, spell(token), own, others))
    return tuple(entries)
