"""Draws tokens: processes logits, then applies Gumbel-max with the noise of `distribution`."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from agentspec.backends.torch.model.device import is_async_device, to_device
from agentspec.backends.torch.sampling.constraints import Constraints
from agentspec.backends.torch.sampling.distribution import (
    Penalties,
    apply_top_k_top_p,
    gumbel_noise,
    has_top_k_top_p,
    position_key,
    signed,
)
from agentspec.types import SamplingParams


class Sampler:
    """Chooses the tokens of one answer. Its history is the prompt and every token passed to `observe`.

    Processors run in vLLM's documented order: `constraints`; logit_bias; repetition (prompt and answer), frequency and
    presence penalties (answer); temperature; min_p; top_k; top_p. A draw depends only on the logits, the history, the
    seed, the answer's index and the absolute position, so that it is the same however the logits were computed.

    With `ahead` (None: True on asynchronous devices, where the host loses time by waiting) the sampler draws the tokens
    of all rows when the step begins, and they reach the host together. Otherwise it processes a row only when `choose`
    asks for its token. Greedy draws from unprocessed logits are so cheap that they are always made ahead.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt: Sequence[int],
        device: torch.device,
        *,
        choice: int = 0,
        constraints: Constraints | None = None,
        ahead: bool | None = None,
    ) -> None:
        self.constraints = constraints
        self._choice = choice
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.greedy = params.greedy
        self._params = params
        self._ahead = is_async_device(device) if ahead is None else ahead
        self._filters = not self.greedy and has_top_k_top_p(params, vocab_size)
        self._ids = torch.arange(vocab_size, device=device)
        self._penalties: Penalties | None = None
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        if penalties != (0, 0, 1) or params.logit_bias:
            self._penalties = Penalties(params, vocab_size, prompt, device)
        self._position = len(prompt)
        self._logits = torch.empty(0)
        self.pending: Tensor | None = None
        self.drawn: list[int] | None = None

    @property
    def _free(self) -> bool:
        """Whether every token is allowed, now and for the rest of the answer."""
        return self.constraints is None or self.constraints.idle

    @property
    def plain(self) -> bool:
        """Whether the next token is simply the one with the highest raw logit."""
        return self._raw and self._free

    @property
    def _raw(self) -> bool:
        return self.greedy and self._penalties is None

    def begin(self, logits: Tensor, tokens: Sequence[int] = (), parents: Sequence[int] = ()) -> None:
        """Take the raw float32 logits [rows, vocab] of a step: row 0 follows the history, row i + 1 node i of a tree.

        Draws ahead where possible, without waiting for the device; `fetch` then transfers several answers' tokens.
        """
        self._logits, self.drawn, self.pending = logits, None, None
        if (self._ahead or self._raw) and (self._free or not self._filters):
            self.pending = self._draw(logits, ancestor_tokens(tokens, parents))

    def choose(self, row: int) -> int:
        """Draw the token that follows the history from row `row`; of equal scores the lowest id wins."""
        fetch([self])
        if self.drawn is not None and (self._free or self._holds(self.drawn[row])):
            return self.drawn[row]
        return int(self._draw(self._allowed(row)[None], [()]))

    def observe(self, token: int) -> None:
        """Append `token` to the history."""
        self._position += 1
        if self.constraints is not None:
            self.constraints.observe(token)
        if self._penalties is not None:
            self._penalties.observe(token)

    def _allowed(self, row: int) -> Tensor:
        """The logits of row `row`, in which what is forbidden is minus infinity."""
        logits = self._logits[row]
        return logits if self.constraints is None else self.constraints.apply(logits)

    def _holds(self, token: int) -> bool:
        """Whether `token`, drawn without the constraints, would also be drawn with them. It would if it is allowed,
        since the best of all scores is then the best of the allowed ones; but not with min_p, top_k or top_p, whose
        result depends on which tokens are allowed.
        """
        return not self._filters and (self.constraints is None or self.constraints.allow(token))

    def _draw(self, rows: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Draw one token id for each row of logits, which follows the history and then its path; returns [rows]."""
        scores = rows if self._penalties is None else self._penalties.apply(rows, paths)
        if self.greedy:
            return scores.argmax(-1)
        scores = apply_top_k_top_p(scores / self._params.temperature, self._params, may_sync=not self._ahead)
        keys = [position_key(self.seed, self._choice, self._position + len(path)) for path in paths]
        if self._filters and not self._ahead:  # of one row: noise is computed only for the tokens that are left
            ids = self._ids[scores[0] > -math.inf]
            return ids[(scores[0, ids] + gumbel_noise(keys[0], ids)).argmax(0, keepdim=True)]
        # The argmax of logits plus Gumbel noise is a draw from their softmax. The noise depends on seed, position and
        # token alone, so that each position gets the same draw as without a draft.
        column = to_device(torch.tensor([[signed(key)] for key in keys]), scores.device)
        return (scores + gumbel_noise(column, self._ids)).argmax(-1)


def fetch(samplers: Sequence[Sampler]) -> None:
    """Transfer the tokens that `samplers` have drawn ahead to the host, in one transfer that the host waits for."""
    drawing = [(sampler, sampler.pending) for sampler in samplers if sampler.pending is not None]
    if not drawing:
        return
    tokens = iter(torch.cat([pending for _, pending in drawing]).tolist())
    for sampler, pending in drawing:
        sampler.pending, sampler.drawn = None, list(islice(tokens, len(pending)))


def ancestor_tokens(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """For each row of a tree's logits, the drafted tokens on the path to it: none for row 0, then a path per node."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent + 1], token))
    return paths
