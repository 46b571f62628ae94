"""Log-probabilities of the raw distribution, before any processing."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from agentspec.types import TokenLogprob


def token_logprob(logits: Tensor, token: int, top: int, spell: Callable[[int], str]) -> TokenLogprob:
    """`token`'s natural-log probability under the float32 row `logits` [vocab], and those of the `top` best tokens."""
    scores = logits.log_softmax(-1)
    best = scores.topk(min(top, len(scores))) if top else None
    pairs = [] if best is None else zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenLogprob(
        token_id=token,
        text=spell(token),
        logprob=float(scores[token]),
        top=tuple(TokenLogprob(int(other), spell(int(other)), value) for other, value in pairs),
    )
