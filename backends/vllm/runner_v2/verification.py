"""Verifies certain drafts by the target's own draw at each position, so that a sampled text is the one without drafts.

vLLM accepts a draft that no model drew as often as the target's probability of it, and otherwise draws again without
it. The distribution is right, but the text depends on what was drafted. The target's own draw is a function of the
request's seed and of the position; a draft that equals it is accepted just as often.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor


class CertainDrafts(NamedTuple):
    """Which requests had a certain draft last, by the runner's row, and those rows that may have had one."""

    used: Tensor
    perhaps: set[int]


def verify(drawn: Tensor, given: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """How many of each request's tokens count, int32 (requests).

    `drawn` (requests, most drafted tokens + 1) are the target's draws from each request's first position on, `given`
    the tokens that it read at all positions of a step: of each request, whose positions are those from one of `starts`
    to one of `ends`, its last token and then the drafted ones.
    """
    places = starts[:, None].long() + torch.arange(1, drawn.shape[1] + 1, device=drawn.device)
    right = (drawn == given[places.clamp(max=len(given) - 1)]) & (places < ends[:, None])
    return 1 + right.int().cumprod(dim=1).sum(dim=1, dtype=torch.int32)


class StrictRejection:
    """Takes the place of vLLM's `rejection_sample`, and calls that where drafts were drawn from a model."""

    def __init__(self, theirs: Callable[..., tuple[Tensor, Tensor]], draw: Callable[..., Tensor]) -> None:
        self._theirs, self._draw = theirs, draw
        self.strict = False  # also where all drafts are certain
        self.ours: dict[int, CertainDrafts] = {}
        """By the address of a speculator's draft logits."""

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
        starts, ends, steps = cu_num_logits[:-1], cu_num_logits[1:], torch.arange(most + 1, device=pos.device)

        def drawn(logits: Tensor, rows: Tensor, pos: Tensor) -> Tensor:
            options = {"apply_temperature": False, "is_drafting": False, "use_fp64": how.get("use_fp64", False)}
            return self._draw(logits, rows, temperature, seed, pos, **options)

        def places(starts: Tensor) -> Tensor:
            return (starts[:, None].long() + steps).clamp(max=len(pos) - 1)

        if draft_logits is None and self.strict:
            tokens = drawn(target_logits, expanded_idx_mapping, pos)[places(starts)]
            return tokens, verify(tokens, draft_sampled, starts, ends)
        drafts = (draft_logits, draft_sampled, cu_num_logits, pos, idx_mapping, expanded_idx_mapping)
        tokens, counts = self._theirs(target_logits, *drafts, *states, **how)
        ours = None if draft_logits is None else self.ours.get(draft_logits.data_ptr())
        if ours is None or not ours.perhaps:
            return tokens, counts
        certain = ours.used[idx_mapping.long()]  # of at most so many requests are vocabularies read
        picked = certain.int().argsort(descending=True, stable=True)[: len(ours.perhaps)]
        flat = places(starts[picked]).flatten()
        own = drawn(target_logits[flat], expanded_idx_mapping[flat], pos[flat]).view(-1, most + 1)
        count = verify(own, draft_sampled, starts[picked], ends[picked])
        tokens[picked] = torch.where(certain[picked, None], own, tokens[picked])
        counts[picked] = torch.where(certain[picked], count, counts[picked])
        return tokens, counts


def strict_rejection() -> StrictRejection:
    """Ours, in the place of vLLM's in this process. Idempotent."""
    sampler = import_module("vllm.v1.worker.gpu.spec_decode.rejection_sampler")
    if not isinstance(sampler.rejection_sample, StrictRejection):
        draw = import_module("vllm.v1.worker.gpu.sample.gumbel").gumbel_sample
        vars(sampler)["rejection_sample"] = StrictRejection(sampler.rejection_sample, draw)
    found: StrictRejection = sampler.rejection_sample
    return found
