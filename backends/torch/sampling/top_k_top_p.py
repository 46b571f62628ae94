"""Filters a distribution by min_p, top_k and top_p."""

from __future__ import annotations

import math
from typing import Final

from torch import Tensor

from agentspec.types import SamplingParams

NUCLEUS_HEAD: Final = 1024  # candidates sorted first; whole rows are sorted only if these are too few


def has_top_k_top_p(params: SamplingParams, vocab_size: int) -> bool:
    """Whether `apply_top_k_top_p` may filter out any token."""
    return params.min_p > 0 or 0 < params.top_k < vocab_size or params.top_p < 1


def apply_top_k_top_p(scores: Tensor, params: SamplingParams, *, may_sync: bool) -> Tensor:
    """`scores` [rows, vocab] with the filtered tokens at minus infinity; equal scores at a boundary are all kept.

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
