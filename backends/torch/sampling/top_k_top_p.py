"""What min_p, top_k and top_p leave of a distribution."""

from __future__ import annotations

import math
from typing import Final

from torch import Tensor

from agentspec.types import SamplingParams

NUCLEUS_HEAD: Final = 1024  # candidates sorted before falling back to sorting them all


def has_top_k_top_p(params: SamplingParams, vocab_size: int) -> bool:
    """Whether `apply_top_k_top_p` may leave anything out."""
    return params.min_p > 0 or 0 < params.top_k < vocab_size or params.top_p < 1


def apply_top_k_top_p(scores: Tensor, params: SamplingParams, *, may_sync: bool) -> Tensor:
    """`scores` [rows, vocab] with what does not survive at minus infinity; equal ones at a boundary survive together.

    The host waits for the device only if it `may_sync`, which saves sorting whole rows where a few tokens are enough.
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
    """[rows, 1], the log of the weight of the `best` scores and of all that equal the last of them."""
    last = best[:, -1:]
    tied = (scores >= last).sum(-1, keepdim=True) - best.shape[-1]
    return best.logsumexp(-1, keepdim=True).logaddexp(last + tied.log())


def _best(scores: Tensor, total: Tensor, top_p: float, may_sync: bool) -> Tensor:
    """As many of the best scores of each row, best first, as the nucleus needs."""
    if may_sync and scores.shape[-1] > NUCLEUS_HEAD:
        head = scores.topk(NUCLEUS_HEAD).values
        if bool((_reached(head, total)[:, -1] >= top_p).all()):
            return head
    return scores.sort(-1, descending=True).values


def _nucleus_bound(best: Tensor, total: Tensor, top_p: float) -> Tensor:
    """[rows, 1], the lowest score inside the smallest set of best tokens whose probability reaches `top_p`."""
    inside = (_reached(best, total) < top_p).sum(-1, keepdim=True)
    return best.gather(-1, inside.clamp(max=best.shape[-1] - 1))


def _reached(best: Tensor, total: Tensor) -> Tensor:
    """The probability of each of the best scores and of all before it together."""
    return (best - total).exp().cumsum(-1)
