"""Verifies certain drafts by the target's own draw at each position, so that a sampled text is the one without drafts.

vLLM accepts a draft that no model drew as often as the target's probability of it, and otherwise draws again without
it. The distribution is right, but the text depends on what was drafted. The target's own draw is a function of the
request's seed and of the position; a draft that equals it is accepted just as often.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_NOTHING = -1  # the row of a request for which vLLM's kernel adds no noise


def verify(drawn: Tensor, given: Tensor, starts: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Each request's tokens, int64 (requests, `most` + 1), and how many of them count, int32 (requests).

    `drawn` are the target's draws at all positions of a step, `given` the tokens that it read there: of each request,
    whose positions begin at one of `starts`, its last token and then at most `most` drafted ones.
    """
    places = starts[:-1, None].long() + torch.arange(most + 1, device=drawn.device)
    last = len(drawn) - 1
    tokens = drawn[places.clamp(max=last)]
    right = (tokens == given[(places + 1).clamp(max=last)]) & (places + 1 < starts[1:, None])
    return tokens, 1 + right.int().cumprod(dim=1).sum(dim=1, dtype=torch.int32)


class StrictRejection:
    """Takes the place of vLLM's `rejection_sample`, and calls that where drafts were drawn from a model."""

    def __init__(self, theirs: Callable[..., tuple[Tensor, Tensor]], draw: Callable[..., Tensor]) -> None:
        self._theirs, self._draw = theirs, draw
        self.strict = False  # also where all drafts are certain
        self.ours: dict[int, Tensor] = {}
        """By the address of a speculator's draft logits: whether the last draft of each request is certain."""

    def __call__(
        self,
        target_logits: Tensor,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        cu_num_logits: Tensor,
        pos: Tensor,
        idx_mapping: Tensor,
        expanded_idx_mapping: Tensor,
        *states: Any,  # among them of all requests the temperature and the seed
        **how: Any,
    ) -> tuple[Tensor, Tensor]:
        _, temperature, seed, most, *_ = states

        def drawn(rows: Tensor) -> tuple[Tensor, Tensor]:
            options = {"apply_temperature": False, "is_drafting": False, "use_fp64": how.get("use_fp64", False)}
            tokens = self._draw(target_logits, rows, temperature, seed, pos, **options)
            return verify(tokens, draft_sampled, cu_num_logits, most)

        if draft_logits is None and self.strict:
            return drawn(expanded_idx_mapping)
        drafts = (draft_logits, draft_sampled, cu_num_logits, pos, idx_mapping, expanded_idx_mapping)
        tokens, counts = self._theirs(target_logits, *drafts, *states, **how)
        ours = None if draft_logits is None else self.ours.get(draft_logits.data_ptr())
        if ours is None:
            return tokens, counts
        certain = ours[idx_mapping.long()]
        own, count = drawn(torch.where(ours[expanded_idx_mapping.long()], expanded_idx_mapping, _NOTHING))
        return torch.where(certain[:, None], own, tokens), torch.where(certain, count, counts)


def strict_rejection() -> StrictRejection:
    """Ours, in the place of vLLM's in this process. Idempotent."""
    sampler = import_module("vllm.v1.worker.gpu.spec_decode.rejection_sampler")
    if not isinstance(sampler.rejection_sample, StrictRejection):
        draw = import_module("vllm.v1.worker.gpu.sample.gumbel").gumbel_sample
        vars(sampler)["rejection_sample"] = StrictRejection(sampler.rejection_sample, draw)
    found: StrictRejection = sampler.rejection_sample
    return found
